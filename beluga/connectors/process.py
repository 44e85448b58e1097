# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""When this process, and the engine in it, began."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# Modules of the processes of an engine that load a model. Such a process begins with its engine.
_LOADERS = ("vllm.v1.worker.worker_base", "sglang.srt.managers.scheduler")


def engine_start_ns() -> int:
    """Return a time before the engine of this process began to load its model, in nanoseconds of
    :func:`time.time_ns`, or 0 if this is no engine's process.
    """
    return int(process_start_s() * 1e9) if not sys.modules.keys().isdisjoint(_LOADERS) else 0


def process_start_s() -> float:
    """Return when this process began, in seconds of :func:`time.time`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # field 22 of proc(5), which counts from 1 and includes pid and name
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
