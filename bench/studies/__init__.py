# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Computed results: routing and eviction policies on traces, and growth with the rack."""
