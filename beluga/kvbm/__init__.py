# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The block manager of an engine. It tracks the content and the users of each block of device
memory, and moves blocks to the pool and back.

``pool`` has the blocks of the device, ``manager`` moves them, ``metrics`` has what both count, the
thresholds and the targets.
"""

from beluga.kvbm.manager import OFFLOAD_POLICIES, BlockManager, CacheTier, SharedTier
from beluga.kvbm.metrics import TARGETS, MissedTarget
from beluga.kvbm.pool import (
    BlockPhase,
    BlockPool,
    Key,
    MutableBlock,
    RegisteredBlock,
)

__all__ = [
    "OFFLOAD_POLICIES",
    "TARGETS",
    "BlockManager",
    "BlockPhase",
    "BlockPool",
    "CacheTier",
    "Key",
    "MissedTarget",
    "MutableBlock",
    "RegisteredBlock",
    "SharedTier",
]
