# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The index of caches: which worker holds which blocks, as KV events or sent requests tell it."""
