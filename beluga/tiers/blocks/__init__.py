# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The logical block manager: which block of a tier has which content, who uses it, and when it
moves to another tier. Nothing here touches a block's bytes.

``state`` has the states of a block, ``pool`` the blocks of one tier, ``inactive`` their order of
eviction, ``handles`` what users hold of them.
"""

from beluga.tiers.blocks.handles import MutableBlock, RegisteredBlock, WeakBlock
from beluga.tiers.blocks.measures import Alert, Targets
from beluga.tiers.blocks.pool import BlockPool
from beluga.tiers.blocks.state import BlockState, Key

__all__ = [
    "Alert",
    "BlockPool",
    "BlockState",
    "Key",
    "MutableBlock",
    "RegisteredBlock",
    "Targets",
    "WeakBlock",
]
