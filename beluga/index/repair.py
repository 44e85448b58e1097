# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Repair of an unused pool (``csrc/check/repair.c``): it drops everything that is damaged."""

from __future__ import annotations

from beluga._ffi import ffi, lib
from beluga.errors import ServerAliveError, raise_for_status
from beluga.index.check import FINDINGS_MAX, CheckReport, check_pool, describe
from beluga.pool import Pool

ROUNDS = 16  # lines that depend on a dropped line are damage in the next round


def repair_pool(
    pool: Pool, *, payload: bool = False, declared_gone: bool = False
) -> tuple[tuple[str, ...], CheckReport]:
    """Drop what :func:`check_pool` finds. The payload of blocks is not changed.

    Returns one line for each change and the report of a check afterwards. No process may use the
    pool. Liveness locks show the processes of this host; other hosts may use a pool with software
    coherence, and ``declared_gone`` states that their processes have ended. Raises DeviceBusyError
    or ServerAliveError before anything is changed.
    """
    pool.refuse_in_use()
    before = check_pool(pool)
    if not (pool.one_host or declared_gone) and (before.serving or before.session_count):
        raise ServerAliveError(
            "servers or sessions of other hosts may use this pool; if all of them are stopped or "
            "off, use --declare-gone"
        )
    acts: list[str] = []
    for _ in range(ROUNDS):
        findings = ffi.new("bl_finding[]", FINDINGS_MAX)
        report = ffi.new("bl_check_report *")
        arguments = payload, findings, FINDINGS_MAX, report, ffi.NULL, 0
        with pool.using() as handle:
            code = lib.bl_check_pool(handle, *arguments)
        raise_for_status(code, "checking")
        damage = list(findings[0 : min(report.finding_count, FINDINGS_MAX)])
        if not damage:
            break
        # Epoch lines are repaired first and separately, because they decide which half is checked.
        epochs = [f for f in damage if f.kind <= lib.BL_FINDING_EPOCH_FUTURE]
        for finding in epochs or damage:
            with pool.using() as handle:
                raise_for_status(lib.bl_repair_finding(handle, [finding]), "repairing")
            acts.append(f"dropped: {describe(finding)}")
    return tuple(acts), check_pool(pool, payload=payload)
