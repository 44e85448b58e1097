# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tiers below the pool, which receive offloaded blocks and return them on demand."""

from beluga.choices import OFFLOADS
from beluga.index import fetch_counters
from beluga.tiers.admission import ADMISSIONS
from beluga.tiers.disk import adopt_disk
from beluga.tiers.disk.file import file_of_tier
from beluga.tiers.kv_shape import KvShape, read_model
from beluga.tiers.remote import no_panic, object_store
from beluga.tiers.service import TierService
from beluga.tiers.settings import TierSettings
from beluga.tiers.sizing import (
    AlwaysFetch,
    BreakEven,
    FetchRule,
    MeasuredBandwidth,
    SizingAdvice,
    TierAdvice,
    TierSize,
    advise,
)
from beluga.tiers.tier import BLOCK, LowerTier, StoredBlock

__all__ = [
    "ADMISSIONS",
    "BLOCK",
    "OFFLOADS",
    "AlwaysFetch",
    "BreakEven",
    "FetchRule",
    "KvShape",
    "LowerTier",
    "MeasuredBandwidth",
    "SizingAdvice",
    "StoredBlock",
    "TierAdvice",
    "TierService",
    "TierSettings",
    "TierSize",
    "adopt_disk",
    "advise",
    "fetch_counters",
    "file_of_tier",
    "no_panic",
    "object_store",
    "read_model",
]
