# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks of this machine: the CPU, memory, limits, devices and packages."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from beluga.connectors import RELEASES
from beluga.doctor.machine import (
    Machine,
    PoolInspection,
    UndeterminedError,
    Verdict,
    error,
    ok,
    unknown,
    warning,
    worst,
)
from beluga.errors import EngineUnavailableError, PoolError
from beluga.pool import dax_nodes, limits, show_size
from beluga.transfer import policy, why_no_queue, work_queues

_ANOTHER_MODEL = "use a CPU that has it"
_SAME_MODEL = "give the virtual machine its host's CPU: qemu-system-x86_64 -cpu host"

_CLOCKSOURCE = "sys/devices/system/clocksource/clocksource0"
# Reading one of these takes no system call.
_FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")


def _missing(machine: Machine, names: tuple[str, ...], flags: dict[str, str]) -> dict[str, str]:
    """Return how to get each of the features that this process does not use."""
    cpu = machine.cpu_flags()
    lacking: dict[str, str] = {}
    for name in names:
        if name in machine.features:
            continue
        if flags.get(name, name) in cpu:
            variable = "BELUGA_FLUSH" if name in ("clflushopt", "clwb") else "BELUGA_ISA"
            lacking[name] = f"unset {variable}"
        else:
            lacking[name] = _SAME_MODEL if "hypervisor" in cpu else _ANOTHER_MODEL
    return lacking


def _aarch64(machine: Machine, feature: str, good: str, without: str) -> Verdict | None:
    """Return the verdict for a CPU that is aarch64, or None."""
    if machine.arch != "aarch64":
        return None
    if not feature or feature in machine.features:
        return ok(f"aarch64: {good}")
    limited = _CRC_FLAGS.get(feature, feature) in machine.cpu_flags()
    return warning(f"aarch64: {without}", "unset BELUGA_ISA" if limited else _ANOTHER_MODEL)


def check_flush(machine: Machine) -> Verdict:
    """Check for clflushopt and clwb."""
    if (
        verdict := _aarch64(machine, "", "dc civac drops lines, dc cvac writes them back", "")
    ) is not None:
        return verdict
    lacking = _missing(machine, ("clflushopt", "clwb"), {})
    if "clflushopt" in lacking:
        return warning(
            "clflushopt is not used: under software coherence clflush drops one line after the "
            "other, so reads are slower",
            lacking["clflushopt"],
        )
    if "clwb" in lacking:
        return ok("clflushopt drops lines; without clwb, lines that are written back are dropped")
    return ok("clflushopt drops lines before reads, clwb writes lines back")


def check_copy(machine: Machine) -> Verdict:
    """Check for the widest instructions that stream copies past the cache."""
    if (
        verdict := _aarch64(
            machine, "neon", "stnp streams 32 bytes at a time", "stnp streams 16 bytes at a time"
        )
    ) is not None:
        return verdict
    lacking = _missing(machine, ("avx2", "avx512", "movdir64b"), {"avx512": "avx512f"})
    limited = [name for name, fix in lacking.items() if fix.startswith("unset")]
    if limited:
        return warning(
            f"BELUGA_ISA excludes {', '.join(limited)}, which this CPU has", "unset BELUGA_ISA"
        )
    if "avx512" not in lacking:
        more = "" if "movdir64b" in lacking else "; movdir64b can submit to dedicated DSA queues"
        return ok(f"avx512 streams whole lines{more}")
    if "avx2" not in lacking:
        return ok("avx2 streams half lines; with avx512 a line would be one store")
    return warning("sse2 streams quarter lines: puts are slower than with avx2", lacking["avx2"])


def check_checksums(machine: Machine) -> Verdict:
    """Check for the instructions that compute checksums."""
    if (
        verdict := _aarch64(
            machine, "crc32", "crc32c computes checksums", "checksums take most of a copy's time"
        )
    ) is not None:
        return verdict
    lacking = _missing(machine, ("sse4.2", "pclmul", "vpclmul"), _CRC_FLAGS)
    if "sse4.2" in lacking or "pclmul" in lacking:
        name = "sse4.2" if "sse4.2" in lacking else "pclmul"
        return warning(f"{name} is not used: checksums take most of a copy's time", lacking[name])
    wide = "" if "vpclmul" in lacking else ", four at once (vpclmul)"
    return ok(f"sse4.2 and pclmul compute checksums{wide}")


_CRC_FLAGS = {"sse4.2": "sse4_2", "pclmul": "pclmulqdq", "vpclmul": "vpclmulqdq", "neon": "asimd"}


def check_clocksource(machine: Machine) -> Verdict:
    """Check the kernel's clock: Beluga reads it before and after most waits."""
    current = machine.read(f"{_CLOCKSOURCE}/current_clocksource")
    if not current.isprintable() or not current:
        raise UndeterminedError(
            f"/{_CLOCKSOURCE}/current_clocksource contains {current[:40]!r}",
            f"cat /{_CLOCKSOURCE}/current_clocksource",
        )
    if current in _FAST_CLOCKS:
        return ok(f"the kernel's clock is {current}, which is read without a system call")
    text = f"the kernel's clock is {current[:40]}: each reading of the time is a system call"
    if "tsc" in (machine.read_if(f"{_CLOCKSOURCE}/available_clocksource") or "").split():
        return warning(text, f"echo tsc | sudo tee /{_CLOCKSOURCE}/current_clocksource")
    return warning(text, "add tsc=reliable to the kernel's command line, and reboot")


def check_tsc(machine: Machine) -> Verdict:
    """Check the time stamp counter, which measures short waits."""
    if (
        verdict := _aarch64(machine, "", "the virtual counter has a constant rate", "")
    ) is not None:
        return verdict
    cpu = machine.cpu_flags()
    lacking = [name for name in ("constant_tsc", "nonstop_tsc") if name not in cpu]
    if not lacking:
        return ok("the time stamp counter has a constant rate and never stops")
    fix = (
        "give the virtual machine its host's CPU: qemu-system-x86_64 -cpu host,+invtsc"
        if "hypervisor" in cpu
        else _ANOTHER_MODEL
    )
    return warning(f"no {' and no '.join(lacking)}: short waits in spin loops vary in length", fix)


_SHM = "/dev/shm"  # noqa: S108  no file is made there
_PAT = "sys/kernel/debug/x86/pat_memtype_list"
_MTRR = "proc/mtrr"
_THP = "sys/kernel/mm/transparent_hugepage"
_SHM_MIN = 1 << 30  # bytes; containers often give 64 MiB
_MEMORY_MIN = 1 << 30

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
    verdict = worst(
        verdicts, f"{platform.memory} ({platform.memory_source}), according to MTRR and PAT"
    )
    if verdict.level == "ok" and closed:
        return unknown("; ".join(closed), "sudo beluga doctor")
    if verdict.level == "ok" and not ranges:
        return unknown(
            f"neither /{_PAT} nor /{_MTRR} lists a range (is debugfs mounted?)",
            "sudo mount -t debugfs none /sys/kernel/debug && sudo beluga doctor",
        )
    return verdict


def _evaluate_type(machine: Machine, name: str, ranges: list[_Range], platform: str) -> Verdict:
    entry = f"sys/bus/dax/devices/{name}"
    try:
        start = machine.read(f"{entry}/resource")
        first = int(start, 16)
        end = first + machine.number(f"{entry}/size")
        kinds = {each.kind for each in ranges if each.first < end and first < each.end}
    except ValueError:
        return unknown(f"/{entry}/resource is not an address", f"cat /{entry}/resource")
    except UndeterminedError as failure:
        return unknown(str(failure), failure.fix)
    # /sys shows address 0 to unprivileged users.
    if first == 0:
        return unknown(f"this user may not see where {name} lies", "sudo beluga doctor")
    mismatched = sorted(kinds - {platform})
    if not mismatched:
        return ok(name)
    if mismatched == ["uncacheable"]:
        fix = "export BELUGA_MEMORY=uncacheable"
    elif mismatched == ["write-back"]:
        fix = "unset BELUGA_MEMORY"
    else:
        fix = "set the range to write-back in the firmware"
    return error(f"{name} is {' and '.join(mismatched)}, but Beluga assumes {platform}", fix)


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
                stat = spec.path.stat()
                grow += max(0, stat.st_size - stat.st_blocks * 512)
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
    if size < _SHM_MIN:
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
    smallest = min(groups, key=lambda limit: limit.size)
    shown = f"{smallest.what} leaves {show_size(max(0, smallest.size))}"
    grow = _missing_bytes(machine)
    fix = "sudo systemctl set-property UNIT MemoryMax=SIZE"
    if grow > smallest.size:
        return error(f"{shown}; the pool's files may grow by {show_size(grow)}: OOM kill then", fix)
    if smallest.size < _MEMORY_MIN:
        return warning(f"{shown}; files in /dev/shm count against it", fix)
    return ok(shown)


_MAPS_MIN = 65530  # the kernel's default
_LOCKED_MIN = 8 << 20  # bytes; the default of recent kernels
_FILES_MIN = 1024
_FILES_OF_CLIENT = 2  # a pidfd and a liveness lock
_FILES_OF_SERVER = 256
_RING = (5, 1)  # the first kernel with io_uring


def check_map_count(machine: Machine) -> Verdict:
    """Check how many mappings a process may have."""
    limit = machine.number("proc/sys/vm/max_map_count")
    if limit >= _MAPS_MIN:
        return ok(f"a process may have {limit} mappings; a pool takes one for each device")
    return warning(
        f"a process may have {limit} mappings; a pool takes one for each device, but engines with "
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
    if limit < _LOCKED_MIN:
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
    need, user = _FILES_MIN, "a server with 64 clients and its tiers"
    facts = machine.pool.facts if machine.pool.paths else None
    if isinstance(facts, PoolInspection):
        need = _FILES_OF_SERVER + _FILES_OF_CLIENT * facts.lane_count
        user = f"a server with {facts.lane_count} clients, which this pool allows,"
    if limit >= need:
        return ok(f"a process may open {limit} files")
    return warning(
        f"a process may open {limit} files; {user} needs {need}",
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
    match = re.match(r"(\d{1,6})\.(\d{1,6})", release)
    if match is None:
        return unknown(f"the kernel's release is {release[:40]!r}", "uname -r")
    if (int(match[1]), int(match[2])) < _RING:
        return warning(
            f"kernel {match[0]} has no io_uring: disk tiers use threads", "use kernel 5.1 or later"
        )
    return ok(f"kernel {match[0]} has io_uring, without a switch; liburing is not needed")


_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI's numbers of a vendor and of a class
_CUDA12, _CUDA13 = 525, 580  # the first drivers for them
_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")


def quoted_command(failure: Exception) -> str | None:
    """Return the command in quotes in an error's text."""
    match = re.search(r"'((?:daxctl|ulimit|truncate) [^']+)'", str(failure))
    return match[1] if match else None


def _in_pool(machine: Machine, name: str) -> bool:
    return any(spec.real_path.name == name for spec in machine.pool.specs)


def check_devdax(machine: Machine) -> Verdict:
    """Check the driver, the alignment and the size of every devdax device."""
    nodes = dax_nodes(machine.root / "sys")
    if not nodes:
        return ok("there is no devdax device; pools lie in files")
    verdicts = []
    for name, node in nodes.items():
        if isinstance(node, PoolError):
            verdict = error if _in_pool(machine, name) else warning
            fix = quoted_command(node) or f"daxctl list -u -d {name}"
            verdicts.append(verdict(str(node), fix))
    good = {name: node for name, node in nodes.items() if not isinstance(node, PoolError)}
    shown = ", ".join(f"{name} ({show_size(node.size)})" for name, node in good.items())
    return worst(verdicts, f"device_dax drives {shown}")


def check_devdax_access(machine: Machine) -> Verdict:
    """Check the permissions of the devdax devices that are suitable for a pool."""
    usable = [
        name
        for name, node in dax_nodes(machine.root / "sys").items()
        if not isinstance(node, PoolError)
    ]
    if not usable:
        return ok("there is no devdax device to open")
    verdicts = []
    for name in usable:
        verdict = error if _in_pool(machine, name) else warning
        if not (machine.root / "dev" / name).exists():
            verdicts.append(verdict(f"there is no /dev/{name}", "sudo udevadm trigger -s dax"))
        elif not machine.may_use(f"dev/{name}"):
            text = f"this user may not read and write /dev/{name}"
            verdicts.append(verdict(text, f"sudo setfacl -m u:{machine.uid}:rw /dev/{name}"))
    return worst(verdicts, f"this user may read and write {', '.join(usable)}")


def check_dsa_queues(machine: Machine) -> Verdict:
    """Check for a work queue of an Intel DSA."""
    root = machine.root / "sys/bus/dsa/devices"
    cause = why_no_queue(root)
    if cause is None:
        names = ", ".join(queue.name for queue in work_queues(root) if queue.fault is None)
        return ok(f"queues that programs may use: {names}")
    text, _, fix = cause.partition("; as root: ")
    if fix:
        return warning(text, fix)
    if "enqcmd" in machine.features:  # of CPUs with a DSA
        return warning(
            "this CPU may have a DSA, but the kernel shows none; the CPU copies",
            "add intel_iommu=on,sm_on to the kernel's command line, and modprobe idxd",
        )
    return ok("this CPU has no DSA (no enqcmd); the CPU copies")


def check_dsa_access(machine: Machine) -> Verdict:
    """Check the permissions of the work queues."""
    queues = [q for q in work_queues(machine.root / "sys/bus/dsa/devices") if q.fault is None]
    if not queues:
        return ok("there is no DSA queue to open")
    verdicts = []
    for name in (queue.name for queue in queues):
        if not (machine.root / "dev/dsa" / name).exists():
            verdicts.append(warning(f"there is no /dev/dsa/{name}", "sudo modprobe idxd"))
        elif not machine.may_use(f"dev/dsa/{name}"):
            text = f"this user may not read and write /dev/dsa/{name}"
            verdicts.append(warning(text, f"sudo setfacl -m u:{machine.uid}:rw /dev/dsa/{name}"))
    names = ", ".join(queue.name for queue in queues)
    return worst(verdicts, f"this user may submit to {names}")


def _gpu_count(machine: Machine) -> int:
    """Return the number of NVIDIA GPUs on the PCI bus."""
    count = 0
    for name in machine.names("sys/bus/pci/devices"):
        entry = f"sys/bus/pci/devices/{name}"
        vendor, kind = machine.read_if(f"{entry}/vendor"), machine.read_if(f"{entry}/class")
        count += vendor == _NVIDIA and (kind or "").startswith(_DISPLAY)
    return count


def _driver(machine: Machine) -> int | None:
    """Return the main version of NVIDIA's driver; None if it is not loaded."""
    text = machine.read_if("proc/driver/nvidia/version")
    if text is None:
        return None
    match = re.search(r"NVRM version:.*?\s(\d{3,6})\.\d+", text)
    if match is None:
        raise UndeterminedError("/proc/driver/nvidia/version names no version", "nvidia-smi")
    return int(match[1])


def check_gpu_driver(machine: Machine) -> Verdict:
    """Check NVIDIA's driver."""
    count, driver = _gpu_count(machine), _driver(machine)
    if driver is None:
        if count == 0:
            return ok("there is no NVIDIA GPU; the CPU copies")
        return warning(
            f"{count} NVIDIA GPUs are plugged in, but their driver is not loaded",
            "sudo modprobe nvidia",
        )
    if driver < _CUDA12:
        return warning(
            f"NVIDIA's driver {driver} is too old for CUDA 12",
            "update the driver to 580 or later",
        )
    return ok(f"NVIDIA's driver {driver}, for CUDA {13 if driver >= _CUDA13 else 12}")


def check_nvrtc(machine: Machine) -> Verdict:
    """Check for the compiler that the CUDA engine needs."""
    driver = _driver(machine)
    if driver is None:
        return ok("without a GPU's driver NVRTC is not needed")
    cuda = 13 if driver >= _CUDA13 else 12
    fix = f"pip install 'beluga-kv[cuda{cuda}]'"
    if (cause := machine.why_no_engine("cuda")) is not None:
        return warning(f"{cause}; without it blocks go through host memory", fix)
    found = {name: text for name in _NVRTC if (text := machine.version(name)) is not None}
    if found and cuda < 13 and all(text.startswith("13.") for text in found.values()):
        return warning(f"NVRTC 13 needs a driver from {_CUDA13} on; this is {driver}", fix)
    return ok(", ".join(f"{name} {text}" for name, text in found.items()) or "NVRTC of a toolkit")


def check_gpu_peer(machine: Machine) -> Verdict:
    """Check whether RDMA adapters can read GPU memory."""
    if _driver(machine) is None:
        return ok("there is no GPU")
    if not machine.names("sys/class/infiniband"):
        return ok("GPUs reach the pool through this host's mapping; there is no RDMA adapter")
    if machine.names("sys/module/nvidia_peermem"):
        return ok("RDMA adapters reach GPU memory (nvidia_peermem)")
    return warning(
        "RDMA adapters reach GPU memory only by way of host memory (nvidia_peermem is not "
        "loaded); this concerns remote tiers only",
        "sudo modprobe nvidia_peermem",
    )


Check = Callable[[Machine], Verdict]


def engine_check(name: str) -> Check:
    """Return the check of one engine's version. The engine is not imported."""
    releases = RELEASES[name]

    def check(machine: Machine) -> Verdict:
        version = machine.version(name)
        if version is None:
            return ok(f"{name} is not in this environment")
        fix = f"pip install '{releases.requirement}'"
        tested = releases.has(version)
        if tested is None:
            return unknown(f"{name} has version {version[:40]!r}", fix)
        if tested:
            return ok(f"{name} {version}")
        if releases.refused:
            text = f"the connector refuses {name} {version}; it needs {releases.requirement}"
            return error(text, fix)
        return warning(f"{name} {version} is not tested; {releases.requirement} is", fix)

    return check


@dataclass(frozen=True, slots=True)
class Extra:
    """A package that some part of Beluga needs."""

    module: str
    distribution: str
    extra: str  # of beluga-kv
    user: str  # the part that needs it


EXTRAS = (
    Extra("zmq", "pyzmq", "router", "KV events need it"),
    Extra("uvloop", "uvloop", "router", "the gateway needs less of the CPU with it"),
    Extra("obstore", "obstore", "tiers", "remote tiers in object stores (s3://) need it"),
    Extra("redis", "redis", "tiers", "remote tiers in Redis or Valkey need it"),
)


def extra_check(extra: Extra) -> Check:
    """Return the check of one optional package. A missing package is not an error."""

    def check(machine: Machine) -> Verdict:
        fix = f"pip install 'beluga-kv[{extra.extra}]'"
        version = machine.version(extra.distribution)
        if version is None:
            return ok(f"{extra.module} is not installed; only {extra.user}: {fix}")
        if (cause := machine.why_no_import(extra.module)) is not None:
            again = f"pip install --force-reinstall {extra.distribution}"
            return warning(f"{extra.distribution} {version} cannot be imported ({cause})", again)
        return ok(f"{extra.distribution} {version}")

    return check
