# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CPUs near a pool's devices. A copy by a CPU of another node crosses the socket link twice."""

from __future__ import annotations

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def parse_cpulist(text: str) -> set[int]:
    """Return the numbers in the kernel's list format, such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def near_cpus(nodes: set[int], *, root: Path = NODES) -> set[int]:
    """Return the CPUs of NUMA ``nodes``. The set is empty if the kernel does not list them."""
    cpus: set[int] = set()
    for node in nodes:
        path = root / f"node{node}" / "cpulist"
        if path.exists():
            cpus |= parse_cpulist(path.read_text())
    return cpus


def run_near(nodes: set[int], *, root: Path = NODES) -> set[int]:
    """Pin the calling thread to the CPUs of ``nodes`` that it may use, and return those CPUs.

    Without such CPUs (no node is known, or a container excludes them) its affinity is unchanged.
    """
    cpus = near_cpus(nodes, root=root) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    return cpus
