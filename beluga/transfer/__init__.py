# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Moving blocks between an engine's scattered memory and the pool.

A plan maps bytes to bytes; an engine executes it. Keys and servers are layers above.
"""

from beluga.transfer import arrangements, policy
from beluga.transfer.calibrate.cost import Cost
from beluga.transfer.calibrate.measure import calibrated
from beluga.transfer.cpu import CopySettings, CpuEngine, default_threads, tuned
from beluga.transfer.cuda import CudaEngine, CupyDriver, HostDriver
from beluga.transfer.cuda import Driver as CudaDriver
from beluga.transfer.dsa import DsaEngine, WorkQueue, why_no_queue, work_queues
from beluga.transfer.engine import CopyEngine, Direction, Transfer, settle
from beluga.transfer.io_handle import IoHandle, TransferStats
from beluga.transfer.layout import BlockLayout, Order, Slots
from beluga.transfer.link import (
    DEVICE_SPEED,
    Link,
    LinkSettings,
    Speed,
    TransferClass,
    host_link,
    host_link_now,
    parse_settings,
    settings_for,
)
from beluga.transfer.plan import CHUNK, PIECE, Plan, plan_blocks, plan_rows
from beluga.transfer.scheduled import ScheduledEngine
from beluga.transfer.select.choice import (
    Chosen,
    Crossovers,
    PlannedEngine,
    PlannedStat,
    Planner,
    Selection,
    choose,
    crossovers,
)
from beluga.transfer.select.registry import ENGINES, EngineEntry, engine_names
from beluga.transfer.view import (
    DTYPE_SIZES,
    Array,
    CudaArray,
    Tensor,
    View,
    is_tensor,
    tensor_start,
)

__all__ = [
    "CHUNK",
    "DEVICE_SPEED",
    "DTYPE_SIZES",
    "ENGINES",
    "PIECE",
    "Array",
    "BlockLayout",
    "Chosen",
    "CopyEngine",
    "CopySettings",
    "Cost",
    "CpuEngine",
    "Crossovers",
    "CudaArray",
    "CudaDriver",
    "CudaEngine",
    "CupyDriver",
    "Direction",
    "DsaEngine",
    "EngineEntry",
    "HostDriver",
    "IoHandle",
    "Link",
    "LinkSettings",
    "Order",
    "Plan",
    "PlannedEngine",
    "PlannedStat",
    "Planner",
    "ScheduledEngine",
    "Selection",
    "Slots",
    "Speed",
    "Tensor",
    "Transfer",
    "TransferClass",
    "TransferStats",
    "View",
    "WorkQueue",
    "arrangements",
    "calibrated",
    "choose",
    "crossovers",
    "default_threads",
    "engine_names",
    "host_link",
    "host_link_now",
    "is_tensor",
    "parse_settings",
    "plan_blocks",
    "plan_rows",
    "policy",
    "settings_for",
    "settle",
    "tensor_start",
    "tuned",
    "why_no_queue",
    "work_queues",
]
