# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool check (``csrc/check/check.c``): every invariant and, on request, every checksum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from beluga._ffi import core, ffi, lib
from beluga.errors import raise_for_status
from beluga.index.findings import describe
from beluga.pool import Pool, SpecLike, survey

FINDINGS_MAX = 1000

Admission: TypeAlias = "tuple[core.bl_io_queue | core.Null, int]"
"""An I/O queue of a link (in C), and a class of transfers."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a pool check. ``findings`` has one line for each finding, at most FINDINGS_MAX.
    ``half`` is the half of the tables that was checked.
    """

    epoch: int
    half: int
    serving: bool
    block_count: int
    block_bytes: int
    extent_count: int
    session_count: int
    finding_count: int
    findings: tuple[str, ...]


def check_pool(
    pool: Pool, *, payload: bool = False, admission: Admission | None = None
) -> CheckReport:
    """Check the serving half of the pool, read-only, whether or not a server runs.

    With ``payload``, compare every block with its checksums. With ``admission``, the link scheduler
    throttles these reads. Damage is reported, not raised. Raises OSError when takeovers happen
    faster than the pool can be read.
    """
    findings = ffi.new("bl_finding[]", FINDINGS_MAX)
    report = ffi.new("bl_check_report *")
    io_queue, kind = admission or (ffi.NULL, 0)
    with pool.using() as handle:
        code = lib.bl_check_pool(handle, payload, findings, FINDINGS_MAX, report, io_queue, kind)
    raise_for_status(code, "checking a pool")
    shown = min(report.finding_count, FINDINGS_MAX)
    return CheckReport(
        epoch=report.epoch,
        half=report.half,
        serving=bool(report.serving),
        block_count=report.block_count,
        block_bytes=report.block_bytes,
        extent_count=report.extent_count,
        session_count=report.session_count,
        finding_count=report.finding_count,
        findings=tuple(describe(finding) for finding in findings[0:shown]),
    )


def check_devices(
    paths: Sequence[SpecLike],
    *,
    payload: bool = False,
    admission: Callable[[Pool], AbstractContextManager[Admission | None]] = lambda _: nullcontext(),
) -> CheckReport:
    """Check the pool on ``paths``. Damaged superblocks prevent all other checks.

    ``admission`` is called with the open pool and yields the argument of :func:`check_pool`. Raises
    a PoolError for a path that is not a device or cannot be opened.
    """
    findings = survey(paths)
    if findings:
        return CheckReport(0, 0, False, 0, 0, 0, 0, len(findings), tuple(findings))
    with Pool.open(paths) as pool, admission(pool) as made:
        return check_pool(pool, payload=payload, admission=made)
