# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks of memory: how the pool is cached and paged, and how much memory it may use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from beluga.doctor.finding import UndeterminedError, Verdict, error, ok, unknown, warning, worst
from beluga.doctor.machine import Machine
from beluga.errors import EngineUnavailableError
from beluga.pool import dax_nodes, limits, show_size
from beluga.transfer import policy

_SHM = "/dev/shm"  # noqa: S108  no file is made there
_PAT = "sys/kernel/debug/x86/pat_memtype_list"
_MTRR = "proc/mtrr"
_THP = "sys/kernel/mm/transparent_hugepage"
_SHM_LEAST = 1 << 30  # bytes; containers often give 64 MiB
_MEMORY_LEAST = 1 << 30

_MTRR_LINE = re.compile(
    r"reg\d+: base=0x([0-9a-fA-F]{1,16}) +\(.*?\), size= *(\d{1,15})([KMGT])B.*?: ([a-z-]+)"
)
_PAT_LINE = re.compile(r"mem 0x([0-9a-fA-F]{1,16})-0x([0-9a-fA-F]{1,16})\] ([a-z-]+)")
_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}
_TYPES = {
    "write-back": "write-back",
    "uncached": "uncacheable",
    "uncached-minus": "uncacheable",
    "uncachable": "uncacheable",
    "write-combining": "write-combining",
    "write-through": "write-through",
}


class _Range(NamedTuple):
    first: int
    end: int
    kind: str  # how the memory is cached


def _mtrr(text: str) -> Iterator[_Range]:
    for base, size, unit, kind in _MTRR_LINE.findall(text):
        first = int(base, 16)
        yield _Range(first, first + (int(size) << _UNITS[unit]), _TYPES.get(kind, kind))


def _pat(text: str) -> Iterator[_Range]:
    for first, end, kind in _PAT_LINE.findall(text):
        yield _Range(int(first, 16), int(end, 16), _TYPES.get(kind, kind))


def _kinds(first: int, end: int, ranges: list[_Range]) -> set[str]:
    """Return how the ranges that overlap [first, end) are cached."""
    return {each.kind for each in ranges if each.first < end and first < each.end}


def _policy_of(machine: Machine) -> policy.PlatformPolicy | Verdict:
    try:
        return policy.probe(cpuinfo=machine.root / "proc/cpuinfo")
    except EngineUnavailableError as failure:
        return error(str(failure), f"unset {str(failure).partition('=')[0]}")
    except OSError:
        return unknown("/proc/cpuinfo cannot be read", "sudo beluga doctor")


def check_memory_type(machine: Machine) -> Verdict:
    """Compare how the firmware and the kernel cache devdax devices with Beluga's assumption."""
    platform = _policy_of(machine)
    if isinstance(platform, Verdict):
        return platform
    nodes = dax_nodes(machine.root / "sys")
    if not nodes:
        return ok(f"{platform.memory} ({platform.memory_source}): there is no devdax device")
    ranges: list[_Range] = []
    closed: list[str] = []
    for name, parse in ((_PAT, _pat), (_MTRR, _mtrr)):
        try:
            ranges += parse(machine.read_if(name) or "")
        except UndeterminedError as failure:
            closed.append(str(failure))
    verdicts = [_evaluate_type(machine, name, ranges, str(platform.memory)) for name in nodes]
    found = worst(
        verdicts, f"{platform.memory} ({platform.memory_source}), according to MTRR and PAT"
    )
    if found.level == "ok" and closed:
        return unknown("; ".join(closed), "sudo beluga doctor")
    if found.level == "ok" and not ranges:
        return unknown(
            f"neither /{_PAT} nor /{_MTRR} lists a range (is debugfs mounted?)",
            "sudo mount -t debugfs none /sys/kernel/debug && sudo beluga doctor",
        )
    return found


def _evaluate_type(machine: Machine, name: str, ranges: list[_Range], platform: str) -> Verdict:
    entry = f"sys/bus/dax/devices/{name}"
    try:
        start = machine.read(f"{entry}/resource")
        first = int(start, 16)
        kinds = _kinds(first, first + machine.number(f"{entry}/size"), ranges)
    except ValueError:
        return unknown(f"/{entry}/resource is not an address", f"cat /{entry}/resource")
    except UndeterminedError as failure:
        return unknown(str(failure), failure.fix)
    # /sys shows address 0 to unprivileged users.
    if first == 0:
        return unknown(f"this user may not see where {name} lies", "sudo beluga doctor")
    wrong = sorted(kinds - {platform})
    if not wrong:
        return ok(name)
    if wrong == ["uncacheable"]:
        fix = "export BELUGA_MEMORY=uncacheable"
    elif wrong == ["write-back"]:
        fix = "unset BELUGA_MEMORY"
    else:
        fix = "set the range to write-back in the firmware"
    return error(f"{name} is {' and '.join(wrong)}, but Beluga assumes {platform}", fix)


def check_ddio(machine: Machine) -> Verdict:
    """Report whether devices write into the CPU's cache, as far as that is known."""
    platform = _policy_of(machine)
    if isinstance(platform, Verdict):
        return platform
    if platform.ddio is not policy.Ddio.UNKNOWN:
        return ok(f"{platform.ddio}, set by {platform.ddio_source}")
    if not machine.names("sys/bus/dsa/devices") and not machine.names("proc/driver/nvidia"):
        return ok("DDIO does not matter here: neither a DSA nor a GPU copies")
    return unknown(
        f"user space cannot read it ({platform.ddio_source}, on or off, as the firmware is set); "
        "until then copies by DSA and GPU invalidate before and flush after, which is always right",
        "export BELUGA_DDIO=on",
    )


def check_huge_shmem(machine: Machine) -> Verdict:
    """Check the page size of files in /dev/shm."""
    switch = machine.chosen(f"{_THP}/shmem_enabled")
    if switch == "force":
        return ok("files in memory have huge pages (shmem_enabled is force)")
    allow = f"echo never | sudo tee /{_THP}/shmem_enabled && "
    fix = "sudo mount -o remount,huge=within_size /dev/shm"
    if switch == "deny":
        return warning(
            "pools in /dev/shm have pages of 4 KiB (shmem_enabled is deny), so copies miss the "
            "TLB more often",
            allow + fix,
        )
    mounted = None  # the options of the topmost file system there
    for line in machine.read("proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4:5] == [_SHM]:
            mounted = after
    if mounted is None:
        return warning(f"no file system is mounted at {_SHM}", f"sudo mount -t tmpfs shm {_SHM}")
    huge = re.search(r"\bhuge=(\w+)", mounted)
    # With huge=advise the pages of a pool are small: they are allocated before they are mapped.
    if huge is not None and huge[1] in ("always", "within_size"):
        return ok(f"pools in {_SHM} have huge pages (huge={huge[1]})")
    return warning(f"pools in {_SHM} have pages of 4 KiB, so copies miss the TLB more often", fix)


def check_huge_anonymous(machine: Machine) -> Verdict:
    """Check whether this process may have huge pages at all."""
    status = machine.read("proc/self/status")
    if re.search(r"^THP_enabled:\s*0", status, re.MULTILINE):
        return error(
            "huge pages are forbidden to this process (PR_SET_THP_DISABLE): touching a devdax "
            "device ends in SIGBUS",
            "start Beluga and the engines from a process without PR_SET_THP_DISABLE",
        )
    switch = machine.chosen(f"{_THP}/enabled")
    if switch == "never":
        return warning(
            "engines' buffers and the server's index have pages of 4 KiB, so copies and lookups "
            "miss the TLB more often (devdax pools are not affected)",
            f"echo madvise | sudo tee /{_THP}/enabled",
        )
    return ok(f"programs that request huge pages get them ({switch})")


def _missing_bytes(machine: Machine) -> int:
    """Return how many bytes the pool's files in /dev/shm may still grow: they are sparse."""
    shm, grow = machine.root / "dev/shm", 0
    for spec in machine.pool.specs:
        try:
            if shm in spec.real_path.parents:
                found = spec.path.stat()
                grow += max(0, found.st_size - found.st_blocks * 512)
        except OSError:
            continue
    return grow


def check_shm_space(machine: Machine) -> Verdict:
    """Compare the free space of /dev/shm with the space that the pool may still need."""
    try:
        size, free = machine.usage(machine.root / "dev/shm")
    except OSError as failure:
        return unknown(
            f"{_SHM} has no size ({failure.strerror})", f"sudo mount -t tmpfs shm {_SHM}"
        )
    grow = _missing_bytes(machine)
    shown = f"{show_size(free)} of {show_size(size)} are free in /dev/shm"
    fix = f"sudo mount -o remount,size=50% {_SHM}"
    if grow > free:
        return error(
            f"{shown}, but the pool's sparse files may grow by {show_size(grow)}: SIGBUS then", fix
        )
    if size < _SHM_LEAST:
        return warning(f"{shown}; a container gets more by docker run --shm-size=SIZE", fix)
    return ok(shown)


def check_cgroup_memory(machine: Machine) -> Verdict:
    """Check the free memory of control groups: files in /dev/shm count against it."""
    shm = machine.root / "dev/shm"
    groups = [
        limit
        for limit in limits(shm if shm.is_dir() else machine.root, root=machine.root)
        if "control group" in limit.what
    ]
    if not groups:
        return ok("no control group limits memory")
    least = min(groups, key=lambda limit: limit.size)
    shown = f"{least.what} leaves {show_size(max(0, least.size))}"
    grow = _missing_bytes(machine)
    fix = "sudo systemctl set-property UNIT MemoryMax=SIZE"
    if grow > least.size:
        return error(f"{shown}; the pool's files may grow by {show_size(grow)}: OOM kill then", fix)
    if least.size < _MEMORY_LEAST:
        return warning(f"{shown}; files in /dev/shm count against it", fix)
    return ok(shown)
