# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The start times of this process and of its engine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# Modules of engine processes that load a model. Such a process starts with its engine.
_LOADERS = ("vllm.v1.worker.worker_base", "sglang.srt.managers.scheduler")


def engine_start_ns() -> int:
    """Return a time before this process's engine started to load its model, in nanoseconds of
    :func:`time.time_ns`, or 0 if this is not an engine's process.
    """
    return int(process_start_s() * 1e9) if not sys.modules.keys().isdisjoint(_LOADERS) else 0


def process_start_s() -> float:
    """Return this process's start in seconds of :func:`time.time`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # field 22 of proc(5), which counts from 1 and includes pid and name
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
