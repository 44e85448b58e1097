# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool check (``csrc/check/check.c``): every invariant and, on request, every checksum.

The text for a finding has its kind, its position, and its consequence for the pool. The names are
those of bl_finding_kind in csrc/api/check.h. ``{place}`` is a half, host, lane, slot, stripe or
block; api/check.h defines ``{detail}``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from beluga._ffi import core, ffi, lib
from beluga.errors import raise_for_status
from beluga.pool import Pool, SpecLike, survey

FINDINGS_MAX = 1000

Admission: TypeAlias = "tuple[core.bl_io_queue | core.Null, int]"
"""An I/O queue of a link (in C), and a class of transfers."""

MISS = "it reads as a miss"
DROPPED = "its blocks are lost at the next restart"
TEXTS = {
    "EPOCH_DAMAGED": "half {place}: the check value of the epoch line is wrong",
    "EPOCH_HALF": "half {place}: the epoch line is that of the other half",
    "EPOCH_STATE": "half {place}: the epoch line has an invalid state",
    "EPOCH_NONSENSE": "half {place}: the server's host number or nonce is invalid",
    "EPOCH_FUTURE": "half {place}: the epoch is too great for a generation",
    "HEARTBEAT_DAMAGED": "half {place}: the check value of the server's heartbeat is wrong",
    "HEARTBEAT_STRANGE": "half {place}: the heartbeat is not that of the serving server",
    "CANDIDATE_DAMAGED": "host {place}: the check value of the candidate line is wrong",
    "CANDIDATE_NONSENSE": "host {place}: the candidate line has no ballot of its own, or no server",
    "CANDIDATE_FUTURE": "host {place}: the candidate's epoch is too great for a generation",
    "LOBBY_REQUEST_DAMAGED": "host {place}: the lobby request is torn, or its check value is wrong",
    "LOBBY_REQUEST_NONSENSE": "host {place}: the lobby request has an invalid kind or no nonce",
    "LOBBY_REQUEST_HOST": "host {place}: the lobby request names another host",
    "LOBBY_REQUEST_FUTURE": "host {place}: the lobby request names an epoch that has not begun",
    "LOBBY_REPLY_DAMAGED": "host {place}: the lobby reply is torn, or its check value is wrong",
    "LOBBY_REPLY_NONSENSE": "host {place}: the lobby reply gives a lane that does not exist",
    "LOBBY_REPLY_FUTURE": "host {place}: the lobby reply has an epoch that has not begun",
    "SESSION_DAMAGED": "lane {place}: the check value of the session line is wrong; "
    "its client is unknown",
    "SESSION_STATE": "lane {place}: the session has an invalid state",
    "SESSION_HOST": "lane {place}: the session's host number is out of range",
    "SESSION_NONSENSE": "lane {place}: the session has no nonce or no epoch",
    "SESSION_FUTURE": "lane {place}: the session has an epoch that has not begun",
    "SESSION_TWICE": "lane {place}: its session has lane {detail}, too",
    "LANE_HEARTBEAT_DAMAGED": "lane {place}: the check value of the client's heartbeat is wrong",
    "REQUEST_DAMAGED": "slot {place}: the request line at {detail:#x} is torn or damaged",
    "REQUEST_NONSENSE": "slot {place}: the request line at {detail:#x} has invalid fields",
    "REPLY_DAMAGED": "slot {place}: the reply line at {detail:#x} is torn or damaged",
    "REPLY_NONSENSE": "slot {place}: the reply line at {detail:#x} has invalid fields",
    "EXTENT_DAMAGED": f"stripe {{place}}: the check value of the mark is wrong; {DROPPED}",
    "EXTENT_PLACE": f"stripe {{place}}: the mark names another stripe; {DROPPED}",
    "EXTENT_STATE": f"stripe {{place}}: the mark has an invalid state; {DROPPED}",
    "EXTENT_SIZE": f"stripe {{place}}: no extent can have its size; {DROPPED}",
    "EXTENT_BEYOND": f"stripe {{place}}: the extent ends beyond the pool; {DROPPED}",
    "EXTENT_FIT": f"stripe {{place}}: its number of blocks is not what fits into it; {DROPPED}",
    "EXTENT_OVERLAP": f"stripe {{place}}: it overlaps the extent at stripe {{detail}}; {DROPPED}",
    "EXTENT_FUTURE": f"stripe {{place}}: it has an epoch that has not begun; {DROPPED}",
    "ENTRY_DAMAGED": f"block {{place}}: the check value of the entry is wrong; {MISS}",
    "ENTRY_STATE": f"block {{place}}: the entry has an invalid state; {MISS}",
    "ENTRY_LENGTH": f"block {{place}}: no block can have its length; {MISS}",
    "ENTRY_CHUNK": f"block {{place}}: its chunks are smaller than a line; {MISS}",
    "ENTRY_UNALIGNED": f"block {{place}}: its offset is not that of a page; {MISS}",
    "ENTRY_BEYOND": f"block {{place}}: it is not in the data stripes; {MISS}",
    "ENTRY_FUTURE": "block {place}: its generation has an epoch that has not begun",
    "ENTRY_HOMELESS": f"block {{place}}: it is not in open extents; {MISS} after a restart",
    "ENTRY_OVERLAP": "block {place}: it shares its space with block {detail}, which is newer",
    "ENTRY_TWICE": "block {place}: it has the key of block {detail}, which is newer",
    "ENTRY_GENERATION": "block {place}: it has the generation of block {detail}",
    "CHECKSUMS_DAMAGED": f"block {{place}}: its checksums are not those committed; {MISS}",
    "PAYLOAD_DAMAGED": f"block {{place}}: its bytes are not those committed; {MISS}",
    "NAME_DAMAGED": "block {place}: the check value of the name is wrong; it is not announced",
    "NAME_FUTURE": "block {place}: its name has an epoch that has not begun",
    "RESERVED": "line at {detail:#x}: a reserved field is used",
    "STRAY": "line at {detail:#x}: it has bytes although nothing uses it",
}

KINDS = {getattr(lib, f"BL_FINDING_{name}"): name.lower().replace("_", "-") for name in TEXTS}
_BY_NUMBER = {getattr(lib, f"BL_FINDING_{name}"): text for name, text in TEXTS.items()}


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


def describe(finding: core.bl_finding) -> str:
    """Format a ``bl_finding`` as one line: its kind, its place and its meaning."""
    text = _BY_NUMBER[finding.kind].format(place=finding.place, detail=finding.detail)
    return f"{KINDS[finding.kind]} {text}"
