# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The index of caches: which worker holds which blocks, by KV events or by the requests sent to
it.
"""
