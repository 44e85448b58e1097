# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The list of all checks, and how they run: no failure of a check stops the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from beluga.connectors import RELEASES
from beluga.doctor import hardware, pool
from beluga.doctor.machine import Finding, Machine, UndeterminedError, Verdict, unknown

Run: TypeAlias = Callable[[Machine], Verdict]


class Check(NamedTuple):
    """A named check. ``docs/operate/operations.md`` has a row for each."""

    name: str
    run: Run


CHECKS: tuple[Check, ...] = (
    Check("cpu-flush", hardware.check_flush),
    Check("cpu-copy", hardware.check_copy),
    Check("cpu-checksums", hardware.check_checksums),
    Check("clocksource", hardware.check_clocksource),
    Check("tsc", hardware.check_tsc),
    Check("memory-type", hardware.check_memory_type),
    Check("ddio", hardware.check_ddio),
    Check("huge-pages-shm", hardware.check_huge_shmem),
    Check("huge-pages", hardware.check_huge_anonymous),
    Check("shm-space", hardware.check_shm_space),
    Check("cgroup-memory", hardware.check_cgroup_memory),
    Check("max-map-count", hardware.check_map_count),
    Check("locked-memory", hardware.check_locked_memory),
    Check("open-files", hardware.check_open_files),
    Check("io-uring", hardware.check_io_uring),
    Check("devdax", hardware.check_devdax),
    Check("devdax-access", hardware.check_devdax_access),
    Check("dsa-queues", hardware.check_dsa_queues),
    Check("dsa-access", hardware.check_dsa_access),
    Check("gpu-driver", hardware.check_gpu_driver),
    Check("nvrtc", hardware.check_nvrtc),
    Check("gpu-peer", hardware.check_gpu_peer),
    *(Check(name, hardware.engine_check(name)) for name in RELEASES),
    *(Check(extra.module, hardware.extra_check(extra)) for extra in hardware.EXTRAS),
    Check("runtime-dirs", pool.check_runtime_dirs),
    Check("stale-pools", pool.check_stale_pools),
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
