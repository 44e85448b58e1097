# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Current problems, for operators. ``docs/operate/monitoring.md`` has alerts for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from beluga.live.snapshot import Note
from beluga.pool import show_size

if TYPE_CHECKING:
    from beluga.live.figures import Figures

_LANES_SCARCE = 0.9


def notes_of(now: Figures, before: Figures | None) -> tuple[Note, ...]:
    """Return the current problems, the most serious first."""
    return (*_damage(now), *_quarantine(now), *_room(now, before))


def _damage(now: Figures) -> list[Note]:
    found = []
    if retired := now.count("pool_retired_bytes"):
        found.append(
            Note(
                "bad", f"{show_size(retired)} of memory failed and are never used again: replace it"
            )
        )
    if wrong := now.count("client_checksum_failures_total"):
        found.append(
            Note(
                "bad",
                f"{wrong} blocks do not match their checksums (none was returned): "
                "'beluga pool check --payload' finds them",
            )
        )
    if damaged := now.count("damaged_entries_total"):
        found.append(Note("warn", f"{damaged} damaged entries were dropped at takeover"))
    return found


def _quarantine(now: Figures) -> list[Note]:
    held, suspect = now.count("pool_quarantined_bytes"), now.count("sessions_suspect")
    if not held and not suspect:
        return []
    return [
        Note(
            "warn",
            f"{show_size(held)} are quarantined and {suspect} sessions are suspect: a client "
            "without a heartbeat may still write; 'beluga stat' shows it",
        )
    ]


def _room(now: Figures, before: Figures | None) -> list[Note]:
    found = []
    if now.total("lanes") and now.total("sessions") > _LANES_SCARCE * now.total("lanes"):
        found.append(
            Note(
                "warn",
                f"{now.count('sessions')} of {now.count('lanes')} lanes are taken: create the pool "
                "with more --lanes",
            )
        )
    if before is None:
        return found
    if now.total("table_evictions_total") > before.total("table_evictions_total"):
        found.append(
            Note(
                "warn",
                "the block table is full, though space is not: blocks are smaller than the pool "
                "was created for (--max-blocks)",
            )
        )
    earlier = before.by("refusals_total", "reason")
    for reason, count in now.by("refusals_total", "reason").items():
        if count > earlier.get(reason, 0.0):
            found.append(Note("warn", f"grants are being refused: {reason}"))
    for labels, state in now.series("tier_breaker_state"):
        if state:
            found.append(Note("warn", f"the breaker of tier {labels['tier']} is not closed"))
    return found
