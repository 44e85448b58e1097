# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tiers below the pool: where blocks sink to, and from where they come back."""

from beluga.tiers.blocks import (
    Alert,
    BlockManager,
    BlockPool,
    BlockState,
    Copy,
    CopyAdmission,
    Key,
    MutableBlock,
    OwnedTier,
    RegisteredBlock,
    Targets,
    WeakBlock,
)
from beluga.tiers.service import Admission, TierService
from beluga.tiers.storage import MemoryType, Storage
from beluga.tiers.tier import BLOCK, LowerTier, StoredBlock
from beluga.tiers.tier_blocks import TierBlocks, copy_blocks

__all__ = [
    "BLOCK",
    "Admission",
    "Alert",
    "BlockManager",
    "BlockPool",
    "BlockState",
    "Copy",
    "CopyAdmission",
    "Key",
    "LowerTier",
    "MemoryType",
    "MutableBlock",
    "OwnedTier",
    "RegisteredBlock",
    "Storage",
    "StoredBlock",
    "Targets",
    "TierBlocks",
    "TierService",
    "WeakBlock",
    "copy_blocks",
]
