# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Sizes of the small pools of these tests."""

LANES = 4
SLOTS = 8
BULK = 8192
