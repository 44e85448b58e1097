# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""L5: moving blocks between an engine's scattered memory and the pool.

A plan says what goes where; an engine executes it; nothing here knows keys or servers.
"""

from beluga.transfer import arrangements, policy
from beluga.transfer.cpu import CpuEngine
from beluga.transfer.dsa import DsaEngine
from beluga.transfer.engine import Engine, Transfer
from beluga.transfer.layout import BlockLayout, Order, Slots
from beluga.transfer.plan import CHUNK, PIECE, Plan, plan_blocks, plan_rows
from beluga.transfer.view import View

__all__ = [
    "CHUNK",
    "PIECE",
    "BlockLayout",
    "CpuEngine",
    "DsaEngine",
    "Engine",
    "Order",
    "Plan",
    "Slots",
    "Transfer",
    "View",
    "arrangements",
    "plan_blocks",
    "plan_rows",
    "policy",
]
