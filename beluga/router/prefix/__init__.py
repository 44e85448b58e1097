# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The index of cache contents (``csrc/prefix/``): which worker holds which blocks, from KV events
or from the requests sent to it.
"""
