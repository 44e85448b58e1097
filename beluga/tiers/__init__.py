# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tiers below the pool: where blocks sink to, and from where they come back."""

from beluga.tiers.blocks import (
    Alert,
    BlockPool,
    BlockState,
    Key,
    MutableBlock,
    RegisteredBlock,
    Targets,
    WeakBlock,
)
from beluga.tiers.tier import BLOCK, LowerTier, StoredBlock

__all__ = [
    "BLOCK",
    "Alert",
    "BlockPool",
    "BlockState",
    "Key",
    "LowerTier",
    "MutableBlock",
    "RegisteredBlock",
    "StoredBlock",
    "Targets",
    "WeakBlock",
]
