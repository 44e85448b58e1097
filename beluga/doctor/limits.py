# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks of what the kernel allows a process: mappings, locked memory, open files, io_uring."""

from __future__ import annotations

import re
import resource

from beluga.doctor.finding import Verdict, ok, unknown, warning
from beluga.doctor.machine import Machine
from beluga.doctor.pool_look import PoolInspection
from beluga.pool import show_size

_MAPS_LEAST = 65530  # the kernel's default
_LOCKED_LEAST = 8 << 20  # bytes; the default of recent kernels
_FILES_LEAST = 1024
_FILES_OF_CLIENT = 2  # a pidfd and a liveness lock
_FILES_OF_SERVER = 256
_RING = (5, 1)  # the first kernel with io_uring


def check_map_count(machine: Machine) -> Verdict:
    """Check how many mappings a process may have."""
    most = machine.number("proc/sys/vm/max_map_count")
    if most >= _MAPS_LEAST:
        return ok(f"a process may have {most} mappings; a pool takes one for each device")
    return warning(
        f"a process may have {most} mappings; a pool takes one for each device, but engines with "
        "a GPU take thousands",
        "sudo sysctl -w vm.max_map_count=262144",
    )


def check_locked_memory(machine: Machine) -> Verdict:
    """Check how much memory a process may lock."""
    limit = machine.limit(resource.RLIMIT_MEMLOCK)
    if limit is None or machine.uid == 0:
        return ok("a process may lock all memory")
    fix = "ulimit -l unlimited"
    if machine.version("mooncake-transfer-engine") is not None:
        return warning(
            f"a process may lock {show_size(limit)}, but Mooncake Store registers its buffers "
            "with RDMA adapters, which locks them",
            fix,
        )
    if limit < _LOCKED_LEAST:
        return warning(
            f"a process may lock {show_size(limit)}: rings of io_uring count against it on "
            "kernels before 5.12",
            fix,
        )
    return ok(f"a process may lock {show_size(limit)}; Beluga itself locks nothing")


def check_open_files(machine: Machine) -> Verdict:
    """Compare how many files a process may open with what the pool's server needs."""
    limit = machine.limit(resource.RLIMIT_NOFILE)
    if limit is None:
        return ok("a process may open any number of files")
    need, why = _FILES_LEAST, "a server with 64 clients and its tiers"
    facts = machine.pool.facts if machine.pool.paths else None
    if isinstance(facts, PoolInspection):
        need = _FILES_OF_SERVER + _FILES_OF_CLIENT * facts.lane_count
        why = f"a server with {facts.lane_count} clients, which this pool allows,"
    if limit >= need:
        return ok(f"a process may open {limit} files")
    return warning(
        f"a process may open {limit} files; {why} needs {need}",
        f"ulimit -n {max(need, 65536)}",
    )


def check_io_uring(machine: Machine) -> Verdict:
    """Check whether the disk tier may use io_uring. Beluga makes the system calls itself."""
    fix = "sudo sysctl -w kernel.io_uring_disabled=0"
    if machine.read_if("proc/sys/kernel/io_uring_disabled") is not None:
        switch = machine.number("proc/sys/kernel/io_uring_disabled")
        if switch == 0 or (switch == 1 and machine.uid == 0):
            return ok("the kernel lets disk tiers use io_uring; liburing is not needed")
        denied = "all users" if switch > 1 else "users outside of kernel.io_uring_group"
        return warning(f"the kernel denies io_uring to {denied}: disk tiers use threads", fix)
    release = machine.read("proc/sys/kernel/osrelease")
    found = re.match(r"(\d{1,6})\.(\d{1,6})", release)
    if found is None:
        return unknown(f"the kernel's release is {release[:40]!r}", "uname -r")
    if (int(found[1]), int(found[2])) < _RING:
        return warning(
            f"kernel {found[0]} has no io_uring: disk tiers use threads", "use kernel 5.1 or later"
        )
    return ok(f"kernel {found[0]} has io_uring, without a switch; liburing is not needed")
