# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How small the pools of these tests are."""

LANES = 4
SLOTS = 8
BULK = 8192
