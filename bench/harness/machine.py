# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The machine of the measurements: CPU, cores, memory, and Beluga's version."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from beluga.pool import Pool, filesystem, show_size

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_CACHE_BYTES = 64 << 20  # assumed for a machine that does not report its caches


@cache
def cpu_model() -> str:
    """Return the kernel's name of the CPU, with the number of CPUs."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = " ".join(line.split(":", 1)[1].split())
            return f"{name}, {os.cpu_count()} CPUs"
    return "unknown"


@cache
def version() -> str:
    """Return the commit of the checkout with these files, or the version of the installed package.
    It is "unknown" for a bare copy of the sources.
    """
    source = Path(__file__).resolve()
    command = ["git", "-C", str(source.parent)]
    try:
        subprocess.run(
            [*command, "ls-files", "--error-unmatch", source.name], check=True, capture_output=True
        )
        commit = subprocess.run(
            [*command, "describe", "--always", "--dirty", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        )
        return commit.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version("beluga-kv")
        return "unknown"


@cache
def commit_date(commit: str) -> str | None:
    """Return the day of a commit, or None if this is not a checkout that has it."""
    folder = Path(__file__).resolve().parent
    name = commit.removesuffix("-dirty")
    if not name.isalnum():
        return None
    command = ["git", "-C", str(folder), "show", "-s", "--format=%cs", f"{name}^{{commit}}"]
    try:
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return shown.stdout.strip()


def facts() -> dict[str, str]:
    """Return a description of this machine for readers."""
    system = platform.uname()
    shown = {
        "CPU": cpu_model(),
        "Cores used": f"{len(cores())} of {os.cpu_count()} CPUs, one for each core",
        "Memory": show_size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "NUMA nodes": str(len(nodes())),
        "Kernel": f"{system.system} {system.release} {system.machine}",
        "Load average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "Commit": version(),
    }
    if "hypervisor" in Path("/proc/cpuinfo").read_text():
        shown["CPU"] += ", a virtual machine"
    return shown


def memory_of(pool: Pool) -> str:
    """Return the kind of the pool's devices: "devdax", "tmpfs/DRAM" (emulated), or the filesystem's
    name.
    """
    device = pool.devices[0]
    if device.kind == "devdax":
        return "devdax"
    kind = filesystem(device.path.parent)
    return f"{kind}/DRAM" if kind in ("tmpfs", "hugetlbfs") else f"{kind} file"


def _numbers(text: str) -> list[int]:
    """Parse a CPU or node list of the kernel: "0-3,8" is 0 1 2 3 8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _siblings(cpu: int) -> list[int]:
    """Return the CPUs that share a core with this one, with itself."""
    path = _CPUS / f"cpu{cpu}/topology/thread_siblings_list"
    return _numbers(path.read_text()) if path.exists() else [cpu]


def cores() -> list[int]:
    """Return one CPU of each core that this process may use, sorted by NUMA node."""
    chosen: list[int] = []
    node_of = {cpu: node for node in nodes() for cpu in node_cpus(node)}
    for cpu in sorted(os.sched_getaffinity(0), key=lambda cpu: (node_of.get(cpu, 0), cpu)):
        if not set(_siblings(cpu)) & set(chosen):
            chosen.append(cpu)
    return chosen


def cache_bytes() -> int:
    """Return the size of the largest cache of one CPU."""
    sizes = [path.read_text() for path in _CPUS.glob("cpu0/cache/index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-2]) * units[size[-2]] for size in sizes), default=_CACHE_BYTES)


def nodes() -> list[int]:
    """Return the NUMA nodes that have memory."""
    path = _NODES / "has_memory"
    return _numbers(path.read_text()) if path.exists() else [0]


def node_cpus(node: int) -> list[int]:
    """Return the CPUs of a NUMA node."""
    path = _NODES / f"node{node}/cpulist"
    return _numbers(path.read_text()) if path.exists() else []


@contextlib.contextmanager
def unpinned() -> Iterator[None]:
    """Let this thread, and the threads that it starts, run on every CPU, also inside pinned()."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def pinned(cpu: int) -> Iterator[None]:
    """Keep this thread, and the threads that it starts, on one CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
