# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A made-up machine for the checks of ``beluga doctor``: files below a root, and a process."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beluga.doctor import Finding, Machine
from beluga.doctor.checks import CHECKS, run_check

CLOCK = "sys/devices/system/clocksource/clocksource0"
THP = "sys/kernel/mm/transparent_hugepage"
PAT = "sys/kernel/debug/x86/pat_memtype_list"
DAX = "sys/bus/dax/devices/dax0.0"
WQ = "sys/bus/dsa/devices/wq0.0"
NVIDIA = "proc/driver/nvidia/version"
GPU = "sys/bus/pci/devices/0000:17:00.0"
FLAGS = "constant_tsc nonstop_tsc clflushopt clwb avx2 avx512f movdir64b enqcmd sse4_2 pclmulqdq"
MIB = 1 << 20

# A machine without fault: a CXL device, a DSA queue, a GPU. A name that ends in -> is a link.
GOOD: dict[str, str] = {
    "proc/cpuinfo": f"processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu {FLAGS}\n",
    "proc/mtrr": "reg00: base=0x0e0000000 ( 3584MB), size=  512MB, count=1: uncachable\n",
    "proc/self/status": "Name:\tpython\nTHP_enabled:\t1\n",
    "proc/self/mountinfo": "30 25 0:26 / /dev/shm rw,nosuid - tmpfs tmpfs rw,huge=within_size\n",
    "proc/self/cgroup": "0::/\n",
    "proc/meminfo": "MemAvailable:  8388608 kB\n",
    "proc/sys/vm/max_map_count": "65530\n",
    "proc/sys/kernel/io_uring_disabled": "0\n",
    "proc/sys/kernel/osrelease": "6.12.0\n",
    NVIDIA: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\n",
    f"{CLOCK}/current_clocksource": "tsc\n",
    f"{CLOCK}/available_clocksource": "tsc hpet acpi_pm\n",
    f"{THP}/shmem_enabled": "always within_size advise [never] deny force\n",
    f"{THP}/enabled": "always [madvise] never\n",
    PAT: "PAT memtype list:\nPAT: [mem 0x0000000100000000-0x0000000110000000] write-back\n",
    f"{DAX}/dev": "252:7\n",
    f"{DAX}/size": f"{256 * MIB}\n",
    f"{DAX}/align": f"{2 * MIB}\n",
    f"{DAX}/numa_node": "1\n",
    f"{DAX}/resource": "0x100000000\n",
    f"{DAX}/driver->": "sys/bus/dax/drivers/device_dax",
    "dev/dax0.0": "",
    f"{WQ}/mode": "shared\n",
    f"{WQ}/type": "user\n",
    f"{WQ}/state": "enabled\n",
    f"{WQ}/size": "32\n",
    f"{WQ}/max_transfer_size": "2097152\n",
    f"{WQ}/max_batch_size": "32\n",
    "dev/dsa/wq0.0": "",
    f"{GPU}/vendor": "0x10de\n",
    f"{GPU}/class": "0x030200\n",
    "sys/module/nvidia_peermem/refcnt": "0\n",
    "sys/class/infiniband/mlx5_0/node_type": "1: CA\n",
    "dev/shm/.keep": "",
}
# The folders of GOOD that a poor machine lacks.
DEVICES = ("sys/bus/dax", "sys/bus/dsa", "sys/bus/pci", "proc/driver", "sys/class", "sys/module")

FEATURES = frozenset(
    ("clflushopt", "clwb", "sse4.2", "avx2", "avx512", "movdir64b", "pclmul", "vpclmul", "enqcmd")
)
PACKAGES = {
    "nvidia-cuda-nvrtc": "13.5.37",
    "vllm": "0.33.1",
    "sglang": "0.5.23",
    "lmcache": "0.5.6",
}


def spoil(root: Path, changes: Mapping[str, str | None]) -> None:
    """Write files below a root; None removes a file or a folder, DIR makes a directory that cannot
    be read as a file.
    """
    for name, text in changes.items():
        path = root / name.removesuffix("->")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if text is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if text == UNREADABLE:
            path.mkdir()  # so that reading fails for root, too
        elif name.endswith("->"):
            (root / text).mkdir(parents=True, exist_ok=True)
            path.symlink_to(root / text)
        else:
            path.write_bytes(text.encode(errors="surrogateescape"))


UNREADABLE = "<unreadable>"


def made(root: Path, changes: Mapping[str, str | None] | None = None, **facts: Any) -> Machine:
    """Return a machine without fault, except for the changes and the other facts."""
    spoil(root, GOOD)
    spoil(root, changes or {})
    packages = facts.pop("packages", PACKAGES)
    broken = facts.pop("broken", {})
    no_engine = facts.pop("no_engine", None)
    limits = facts.pop("limits", {})
    usual = {
        "root": root,
        "features": FEATURES,
        "arch": "x86_64",
        "uid": 1000,
        "limit": lambda kind: limits.get(kind, 1 << 30),
        "version": packages.get,
        "why_no_import": broken.get,
        "why_no_engine": lambda name: no_engine,
        "usage": lambda folder: (64 << 30, 60 << 30),
    }
    return Machine(**(usual | facts))


def finding(name: str, machine: Machine) -> Finding:
    """Return the finding of one check."""
    return run_check(next(check for check in CHECKS if check.name == name), machine)
