# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The logical block manager: which block of a tier has which content, who uses it, and when it
moves to another tier.

``state`` has the states of a block, ``pool`` the blocks of one tier, ``inactive`` their order of
eviction, ``handles`` what users hold of them. ``manager`` moves blocks between tiers: ``offload``
and ``onboard`` are its queues, ``mover`` makes the copies.
"""

from beluga.tiers.blocks.handles import MutableBlock, RegisteredBlock, WeakBlock
from beluga.tiers.blocks.manager import BlockManager
from beluga.tiers.blocks.measures import Alert, Targets
from beluga.tiers.blocks.mover import Copy, CopyAdmission, OwnedTier
from beluga.tiers.blocks.pool import BlockPool
from beluga.tiers.blocks.state import BlockPhase, Key

__all__ = [
    "Alert",
    "BlockManager",
    "BlockPhase",
    "BlockPool",
    "Copy",
    "CopyAdmission",
    "Key",
    "MutableBlock",
    "OwnedTier",
    "RegisteredBlock",
    "Targets",
    "WeakBlock",
]
