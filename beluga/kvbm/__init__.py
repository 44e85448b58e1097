# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The block manager of an engine. It tracks the content and the users of each block of device
memory, and moves blocks to the pool and back.

``state`` has the states of a block, ``pool`` the blocks of the device, ``inactive`` their order of
eviction, ``handles`` the users' references. ``manager`` moves blocks: ``offload`` and ``onboard``
are its queues, ``shared_tier`` is the pool below.
"""

from beluga.kvbm.handles import MutableBlock, RegisteredBlock, WeakBlock
from beluga.kvbm.manager import BlockManager
from beluga.kvbm.metrics import MissedTarget, Targets
from beluga.kvbm.offload import OFFLOAD_POLICIES
from beluga.kvbm.pool import BlockPool
from beluga.kvbm.shared_tier import CacheTier, SharedTier
from beluga.kvbm.state import BlockPhase, Key

__all__ = [
    "OFFLOAD_POLICIES",
    "BlockManager",
    "BlockPhase",
    "BlockPool",
    "CacheTier",
    "Key",
    "MissedTarget",
    "MutableBlock",
    "RegisteredBlock",
    "SharedTier",
    "Targets",
    "WeakBlock",
]
