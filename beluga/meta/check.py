# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Looking a pool over (``csrc/check.c``): every invariant, on request every checksum."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from beluga._ffi import ffi, lib
from beluga.errors import check

if TYPE_CHECKING:
    from beluga.pool import Pool

FINDINGS_MAX = 1000

# By bl_finding_kind of csrc/api.h.
TEXTS = {
    lib.BL_FINDING_EPOCH_DAMAGED: "the epoch line of half {place} is damaged",
    lib.BL_FINDING_EXTENT_DAMAGED: "the extent mark of stripe {place} is damaged",
    lib.BL_FINDING_EXTENT_NONSENSE: "the extent mark of stripe {place} makes no sense",
    lib.BL_FINDING_EXTENT_OVERLAP: "the extent at stripe {place} overlaps another",
    lib.BL_FINDING_ENTRY_DAMAGED: "the entry of block {place} is damaged",
    lib.BL_FINDING_ENTRY_NONSENSE: "the entry of block {place} makes no sense",
    lib.BL_FINDING_ENTRY_FUTURE: "the entry of block {place} is of an epoch that has not been",
    lib.BL_FINDING_ENTRY_HOMELESS: "block {place} at {detail:#x} lies in no extent of its size",
    lib.BL_FINDING_ENTRY_OVERLAP: "block {place} at {detail:#x} shares its space with another",
    lib.BL_FINDING_ENTRY_TWICE: "block {place} has a key that another block has too",
    lib.BL_FINDING_PAYLOAD_DAMAGED: "block {place} at {detail:#x}: the checksums do not match",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a look over a pool gave; ``findings`` has a line each, at most FINDINGS_MAX of them."""

    epoch: int
    serving: bool
    block_count: int
    block_bytes: int
    extent_count: int
    finding_count: int
    findings: tuple[str, ...]


def check_pool(pool: Pool, *, payload: bool = False) -> Report:
    """Check what the serving half of the pool says, read-only, live or dead.

    ``payload`` compares every block with its checksums too. Damage is reported, not raised.
    """
    findings = ffi.new("bl_finding[]", FINDINGS_MAX)
    report = ffi.new("bl_check_report *")
    check(
        lib.bl_check_pool(pool.handle, payload, findings, FINDINGS_MAX, report), "checking a pool"
    )
    shown = min(report.finding_count, FINDINGS_MAX)
    return Report(
        epoch=report.epoch,
        serving=bool(report.serving),
        block_count=report.block_count,
        block_bytes=report.block_bytes,
        extent_count=report.extent_count,
        finding_count=report.finding_count,
        findings=tuple(
            TEXTS[f.kind].format(place=f.place, detail=f.detail) for f in findings[0:shown]
        ),
    )
