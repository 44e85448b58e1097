# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The list of all checks, and how they run: no failure of a check stops the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from beluga.connectors import RELEASES
from beluga.doctor import cpu, devices, leftovers, limits, memory, packages, pool
from beluga.doctor.finding import Finding, UndeterminedError, Verdict, unknown
from beluga.doctor.machine import Machine

Run: TypeAlias = Callable[[Machine], Verdict]


class Check(NamedTuple):
    """A named check. ``docs/operate/operations.md`` has a row for each."""

    name: str
    run: Run


CHECKS: tuple[Check, ...] = (
    Check("cpu-flush", cpu.check_flush),
    Check("cpu-copy", cpu.check_copy),
    Check("cpu-checksums", cpu.check_checksums),
    Check("clocksource", cpu.check_clocksource),
    Check("tsc", cpu.check_tsc),
    Check("memory-type", memory.check_memory_type),
    Check("ddio", memory.check_ddio),
    Check("huge-pages-shm", memory.check_huge_shmem),
    Check("huge-pages", memory.check_huge_anonymous),
    Check("shm-space", memory.check_shm_space),
    Check("cgroup-memory", memory.check_cgroup_memory),
    Check("max-map-count", limits.check_map_count),
    Check("locked-memory", limits.check_locked_memory),
    Check("open-files", limits.check_open_files),
    Check("io-uring", limits.check_io_uring),
    Check("devdax", devices.check_devdax),
    Check("devdax-access", devices.check_devdax_access),
    Check("dsa-queues", devices.check_dsa_queues),
    Check("dsa-access", devices.check_dsa_access),
    Check("gpu-driver", devices.check_gpu_driver),
    Check("cupy", devices.check_cupy),
    Check("gpu-peer", devices.check_gpu_peer),
    *(Check(name, packages.engine_check(name)) for name in RELEASES),
    *(Check(extra.module, packages.extra_check(extra)) for extra in packages.EXTRAS),
    Check("runtime-dirs", leftovers.check_runtime_dirs),
    Check("stale-pools", leftovers.check_stale_pools),
    Check("pool-devices", pool.check_devices),
    Check("pool-superblocks", pool.check_superblocks),
    Check("pool-coherence", pool.check_coherence),
    Check("pool-server", pool.check_server),
    Check("pool-host", pool.check_host),
)


def run_check(check: Check, machine: Machine) -> Finding:
    """Return the finding of one check. A failure of the check itself is a finding, too."""
    try:
        verdict = check.run(machine)
    except UndeterminedError as failure:
        verdict = unknown(str(failure), failure.fix)
    except Exception as failure:
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())
        verdict = unknown(f"this check failed ({reason[:200]})", "report this to Beluga's authors")
    level, text, fix = verdict
    return Finding(check.name, level, _line(text), _line(fix))


def _line(text: str) -> str:
    """Return the text as one line without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def diagnose(machine: Machine) -> list[Finding]:
    """Return one finding for every check, in the order of the list."""
    return [run_check(check, machine) for check in CHECKS]
