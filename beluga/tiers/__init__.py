# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tiers below the pool: where blocks sink to, and from where they come back."""

from beluga.index import ask_counters
from beluga.tiers.admission import ADMISSIONS
from beluga.tiers.blocks import (
    Alert,
    BlockManager,
    BlockPhase,
    BlockPool,
    Copy,
    CopyAdmission,
    Key,
    MutableBlock,
    OwnedTier,
    RegisteredBlock,
    Targets,
    WeakBlock,
)
from beluga.tiers.breakeven import AlwaysFetch, BreakEven, FetchRule, MeasuredBandwidth
from beluga.tiers.disk import adopt_disk
from beluga.tiers.kv_shape import KvShape, read_model
from beluga.tiers.remote import no_panic, object_store
from beluga.tiers.service import TierService
from beluga.tiers.settings import OFFLOADS, TierSettings
from beluga.tiers.sizing import SizingAdvice, TierAdvice, TierSize, advise
from beluga.tiers.storage import MemoryType, Storage
from beluga.tiers.tier import BLOCK, LowerTier, StoredBlock
from beluga.tiers.tier_blocks import TierBlocks, copy_blocks

__all__ = [
    "ADMISSIONS",
    "BLOCK",
    "OFFLOADS",
    "Alert",
    "AlwaysFetch",
    "BlockManager",
    "BlockPhase",
    "BlockPool",
    "BreakEven",
    "Copy",
    "CopyAdmission",
    "FetchRule",
    "Key",
    "KvShape",
    "LowerTier",
    "MeasuredBandwidth",
    "MemoryType",
    "MutableBlock",
    "OwnedTier",
    "RegisteredBlock",
    "SizingAdvice",
    "Storage",
    "StoredBlock",
    "Targets",
    "TierAdvice",
    "TierBlocks",
    "TierService",
    "TierSettings",
    "TierSize",
    "WeakBlock",
    "adopt_disk",
    "advise",
    "ask_counters",
    "copy_blocks",
    "no_panic",
    "object_store",
    "read_model",
]
