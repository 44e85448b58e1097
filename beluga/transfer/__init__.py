# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Moving blocks between an engine's scattered memory and the pool.

A plan maps bytes to bytes; an engine executes it. Keys and servers are layers above. The names of
:mod:`beluga.transfer.cuda` are imported on access, because few processes use a GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from beluga.transfer import arrangements, policy
from beluga.transfer.cpu import CopySettings, CpuEngine, default_threads
from beluga.transfer.dsa import DsaEngine, WorkQueue, why_no_queue, work_queues
from beluga.transfer.engine import CopyEngine, Direction, Transfer, keep_for_good, settle
from beluga.transfer.engines import (
    ENGINES,
    NEVER,
    EngineChoice,
    EngineEntry,
    EngineFacts,
    choose_engine,
    copy_setting_names,
    engine_facts,
    engine_names,
)
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
from beluga.transfer.view import (
    DTYPE_SIZES,
    Array,
    CudaArray,
    Tensor,
    View,
    is_tensor,
    tensor_start,
)

if TYPE_CHECKING:
    from beluga.transfer.cuda import CudaDevice, CudaEngine

__all__ = [
    "CHUNK",
    "DEVICE_SPEED",
    "DTYPE_SIZES",
    "ENGINES",
    "NEVER",
    "PIECE",
    "Array",
    "BlockLayout",
    "CopyEngine",
    "CopySettings",
    "CpuEngine",
    "CudaArray",
    "CudaDevice",
    "CudaEngine",
    "Direction",
    "DsaEngine",
    "EngineChoice",
    "EngineEntry",
    "EngineFacts",
    "IoHandle",
    "Link",
    "LinkSettings",
    "Order",
    "Plan",
    "Slots",
    "Speed",
    "Tensor",
    "Transfer",
    "TransferClass",
    "TransferStats",
    "View",
    "WorkQueue",
    "arrangements",
    "choose_engine",
    "copy_setting_names",
    "default_threads",
    "engine_facts",
    "engine_names",
    "host_link",
    "host_link_now",
    "is_tensor",
    "keep_for_good",
    "parse_settings",
    "plan_blocks",
    "plan_rows",
    "policy",
    "settings_for",
    "settle",
    "tensor_start",
    "why_no_queue",
    "work_queues",
]

if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name):
        if name not in ("CudaDevice", "CudaEngine"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("beluga.transfer.cuda"), name)
