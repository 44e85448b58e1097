# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks of the processor: the instructions that Beluga uses where they exist, and its clocks."""

from __future__ import annotations

from beluga.doctor.finding import UndeterminedError, Verdict, ok, warning
from beluga.doctor.machine import Machine

_ANOTHER_MODEL = "use a CPU that has it"
_SAME_MODEL = "give the virtual machine its host's CPU: qemu-system-x86_64 -cpu host"

_CLOCKSOURCE = "sys/devices/system/clocksource/clocksource0"
# Reading one of these takes no system call.
_FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")


def _missing(machine: Machine, names: tuple[str, ...], flags: dict[str, str]) -> dict[str, str]:
    """Return how to get each of the features that this process does not use."""
    cpu = machine.cpu_flags()
    lost: dict[str, str] = {}
    for name in names:
        if name in machine.features:
            continue
        if flags.get(name, name) in cpu:
            variable = "BELUGA_FLUSH" if name in ("clflushopt", "clwb") else "BELUGA_ISA"
            lost[name] = f"unset {variable}"
        else:
            lost[name] = _SAME_MODEL if "hypervisor" in cpu else _ANOTHER_MODEL
    return lost


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
    lost = _missing(machine, ("clflushopt", "clwb"), {})
    if "clflushopt" in lost:
        return warning(
            "clflushopt is not used: under software coherence clflush drops one line after the "
            "other, so reads are slower",
            lost["clflushopt"],
        )
    if "clwb" in lost:
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
    lost = _missing(machine, ("avx2", "avx512", "movdir64b"), {"avx512": "avx512f"})
    limited = [name for name, fix in lost.items() if fix.startswith("unset")]
    if limited:
        return warning(
            f"BELUGA_ISA excludes {', '.join(limited)}, which this CPU has", "unset BELUGA_ISA"
        )
    if "avx512" not in lost:
        rest = "" if "movdir64b" in lost else "; movdir64b can submit to dedicated DSA queues"
        return ok(f"avx512 streams whole lines{rest}")
    if "avx2" not in lost:
        return ok("avx2 streams half lines; with avx512 a line would be one store")
    return warning("sse2 streams quarter lines: puts are slower than with avx2", lost["avx2"])


def check_checksums(machine: Machine) -> Verdict:
    """Check for the instructions that compute checksums."""
    if (
        verdict := _aarch64(
            machine, "crc32", "crc32c computes checksums", "checksums take most of a copy's time"
        )
    ) is not None:
        return verdict
    lost = _missing(machine, ("sse4.2", "pclmul", "vpclmul"), _CRC_FLAGS)
    if "sse4.2" in lost or "pclmul" in lost:
        name = "sse4.2" if "sse4.2" in lost else "pclmul"
        return warning(f"{name} is not used: checksums take most of a copy's time", lost[name])
    wide = "" if "vpclmul" in lost else ", four at once (vpclmul)"
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
    lost = [name for name in ("constant_tsc", "nonstop_tsc") if name not in cpu]
    if not lost:
        return ok("the time stamp counter has a constant rate and never stops")
    fix = (
        "give the virtual machine its host's CPU: qemu-system-x86_64 -cpu host,+invtsc"
        if "hypervisor" in cpu
        else _ANOTHER_MODEL
    )
    return warning(f"no {' and no '.join(lost)}: short waits in spin loops vary in length", fix)
