# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Moving blocks between an engine's scattered memory and the pool.

A plan says what goes where; an engine executes it; nothing here knows keys or servers.
"""

from beluga.transfer import arrangements, policy
from beluga.transfer.calibration import calibrated
from beluga.transfer.choice import (
    CHOICES,
    Chosen,
    Crossovers,
    EngineChoice,
    choose,
    crossovers,
    why_no_dsa,
)
from beluga.transfer.cost import DEVICE_SPEED, Speed
from beluga.transfer.cpu import CpuEngine, default_threads
from beluga.transfer.cuda import CudaEngine, CupyDriver, HostDriver
from beluga.transfer.cuda import Driver as CudaDriver
from beluga.transfer.dsa import DsaEngine
from beluga.transfer.engine import Direction, Engine, Transfer, settle
from beluga.transfer.hostlink import host_link, settings_for, settings_said
from beluga.transfer.job import Job
from beluga.transfer.layout import BlockLayout, Order, Slots
from beluga.transfer.link import Link, LinkSettings, TransferClass
from beluga.transfer.place import Carried, Place
from beluga.transfer.plan import CHUNK, PIECE, Plan, plan_blocks, plan_rows
from beluga.transfer.planned import PlannedEngine, PlannedStat
from beluga.transfer.planner import EngineKind, Planner
from beluga.transfer.scheduler import ScheduledEngine, Scheduler
from beluga.transfer.tuning import CopySettings, tuned
from beluga.transfer.view import Array, CudaArray, Tensor, View, is_tensor

__all__ = [
    "CHOICES",
    "CHUNK",
    "DEVICE_SPEED",
    "PIECE",
    "Array",
    "BlockLayout",
    "Carried",
    "Chosen",
    "CopySettings",
    "CpuEngine",
    "Crossovers",
    "CudaArray",
    "CudaDriver",
    "CudaEngine",
    "CupyDriver",
    "Direction",
    "DsaEngine",
    "Engine",
    "EngineChoice",
    "EngineKind",
    "HostDriver",
    "Job",
    "Link",
    "LinkSettings",
    "Order",
    "Place",
    "Plan",
    "PlannedEngine",
    "PlannedStat",
    "Planner",
    "ScheduledEngine",
    "Scheduler",
    "Slots",
    "Speed",
    "Tensor",
    "Transfer",
    "TransferClass",
    "View",
    "arrangements",
    "calibrated",
    "choose",
    "crossovers",
    "default_threads",
    "host_link",
    "is_tensor",
    "plan_blocks",
    "plan_rows",
    "policy",
    "settings_for",
    "settings_said",
    "settle",
    "tuned",
    "why_no_dsa",
]
