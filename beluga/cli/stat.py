# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga stat``: the server's state, its clients, and its quarantine."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beluga.cli.frame import Legend, explains, width
from beluga.cli.options import Host, Json, PoolPaths, Wide, open_pool
from beluga.cli.output import print_facts, print_json, print_line, print_table

if TYPE_CHECKING:
    from beluga.index import IndexStat, Sessions, SessionView

_WIDTH = 78
_NAME_MAX = 15  # length of a process's name in the kernel


_CLIENTS = Legend(
    {
        "host": "the client's number among the pool's hosts",
        "pid": "its process on that host",
        "kind": "its kind, such as vllm; a dash until its first report",
        "name": "the name of its process, if this host can see it",
        "age": "the time since it attached to the server",
        "calls": "the number of its calls",
        "pins": "the number of blocks it has pinned, which are not evicted",
        "puts": "the number of blocks it is writing",
        "seen": "the time since its last heartbeat",
    }
)


_SUMMARY = Legend(
    {
        "hit rate": "the share of looked-up keys that hit, since the server started",
        "space full": "the share of the block space that is in use",
        "table full": "the share of the block table that is in use",
        "blocks": "the committed blocks; pinned ones are not evicted",
        "since takeover": "counts since this server started",
        "clients": "attached sessions; suspect ones have no heartbeat",
        "quarantined": "space that a lost session could still write to",
        "retired": "space on failed memory, which is never used again",
        "tier NAME": "the contents of a lower tier, and the blocks moved to and from it",
        "for lower tiers": "blocks that wait to be offered to the tiers, or to be fetched",
    }
)


@explains(_SUMMARY, _CLIENTS)
def stat(pool: PoolPaths = None, host: Host = None, wide: Wide = False, json: Json = False) -> None:
    """Show the state of the pool, its clients, and quarantined space with the reasons.

    --json has every counter.
    """
    from beluga.index import IndexClient, fetch_counters, fetch_sessions
    from beluga.rpc import Client

    with open_pool(pool) as opened, Client(opened, host=host) as client:
        index, sessions = IndexClient(client).stat(), fetch_sessions(client)
        lower, own = fetch_counters(client), client.stat()
        directory = opened.runtime_dir
    counters = index.as_dict() | {"table_full": _taken(index) >= index.block_count_max}
    others = [session for session in sessions.sessions if session.nonce != f"{own.nonce:016x}"]
    quarantined = _quarantine(index, others, own.epoch)
    if json:
        shown = counters | {
            "epoch": own.epoch,
            "hit_rate": _hit_rate(index),
            "draining": sessions.draining,
            "quota": asdict(sessions.quota),
            "sessions": [
                asdict(session) | {"name": _name(session, directory)} for session in others
            ],
            "quarantine": quarantined,
        }
        print_json(shown if lower is None else shown | {"lower_tiers": lower})
        return
    print_facts(_summary(index, sessions, others, own.epoch) | _tiers(lower))
    live = [session for session in others if session.state == "live"]
    if live:
        print_table(_CLIENTS, _clients(live, directory), spare=("puts", "pins", "age"), wide=wide)
    for row in quarantined:
        print_line(_row(row))


def _taken(index: IndexStat) -> int:
    return index.block_count + index.grant_count


def _hit_rate(index: IndexStat) -> float | None:
    return index.hit_count / index.lookup_count if index.lookup_count else None


def _summary(
    index: IndexStat, sessions: Sessions, others: Sequence[SessionView], epoch: int
) -> dict[str, object]:
    """Return the counters as a readable summary."""
    from beluga.pool import show_size

    rate = _hit_rate(index)
    suspect = sum(session.state != "live" for session in others)
    clients = sum(session.kind != "server" for session in others) - suspect
    full = index.used_bytes / max(1, index.data_bytes)
    facts: dict[str, object] = {
        "server": f"epoch {epoch}" + (", draining: puts are refused" if sessions.draining else ""),
        "hit rate": "no lookups yet" if rate is None else f"{rate:.1%} of {index.lookup_count:,}",
        "space full": f"{full:.1%} of {show_size(index.data_bytes)}",
        "table full": f"{_taken(index) / max(1, index.block_count_max):.1%} of "
        f"{index.block_count_max:,} blocks",
        "blocks": f"{index.block_count:,}, {show_size(index.block_bytes)}; "
        f"{index.pinned_count:,} pinned, {index.grant_count:,} being written",
        "since takeover": f"{index.commit_count:,} stored, {index.evict_count:,} evicted, "
        f"{index.remove_count:,} removed, {index.refuse_count:,} refused",
        "clients": f"{clients}" + (f", and {suspect} suspect" if suspect else ""),
        "quarantined": show_size(index.held_bytes) if index.held_bytes else "nothing",
    }
    if index.retired_stripe_count:
        stripe_size = index.data_bytes // max(1, index.stripe_count)
        facts["retired"] = show_size(index.retired_stripe_count * stripe_size)
    return facts


def _tiers(lower: Mapping[str, Any] | None) -> dict[str, str]:
    """Return a line for each lower tier, and one for pending work."""
    if lower is None:
        return {}
    work = lower.get("work", {})
    removals = work.get("removal_count", 0)
    pending = f", {removals:,} removals are not executed yet" if removals else ""
    return {
        f"tier {name}": _tier(counters) for name, counters in lower.get("tiers", {}).items()
    } | {
        "for lower tiers": f"{work.get('dirty_count', 0):,} blocks wait to be offered, "
        f"{work.get('wanted_count', 0):,} are being fetched{pending}"
    }


def _tier(counters: Mapping[str, Any]) -> str:
    from beluga.pool import show_size

    facts = []
    if "blocks" in counters:
        used, size = counters.get("used_bytes", 0), counters.get("data_bytes", 0)
        facts.append(f"{counters['blocks']:,} blocks, {show_size(used)} of {show_size(size)}")
    for word in ("saved", "loaded", "missed"):
        facts.append(f"{counters.get(f'{word}_blocks', 0):,} {word}")
    failures = counters.get("failures", counters.get("errors", {}))
    if count := sum(failures.values()) if isinstance(failures, Mapping) else failures:
        facts.append(f"{count:,} failures")
    if counters.get("breaker_state", "closed") != "closed":
        facts.append(f"breaker {counters['breaker_state']}")
    return ", ".join(facts)


def _clients(sessions: Sequence[SessionView], directory: Path) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [
        (
            session.host,
            str(session.pid or "-"),
            session.kind,
            _name(session, directory),
            _span(session.since_s),
            _short(session.call_count),
            _short(session.pin_count),
            _short(session.grant_count),
            _span(session.heartbeat_s),
        )
        for session in sessions
    ]
    return rows


def _quarantine(
    index: IndexStat, sessions: Sequence[SessionView], epoch: int
) -> list[dict[str, Any]]:
    """Return the quarantine: for each suspect session its duration, its reason, and what ends it.

    It is unknown where sessions of earlier epochs write, so their space is quarantined together:
    their ``bytes`` are None, and the last row has the total.
    """
    rows: list[dict[str, Any]] = []
    suspect = [session for session in sessions if session.state != "live"]
    for session in suspect:
        rows.append(
            {
                "host": session.host,
                "lane": session.lane,
                "pid": session.pid,
                "since_s": session.since_s,
                "bytes": session.held_bytes if session.epoch == epoch else None,
                "why": session.why(epoch=epoch),
                "freed_by": session.freed_by(),
            }
        )
    shared = index.held_bytes - sum(session.held_bytes for session in suspect)
    earlier = sum(session.epoch != epoch for session in suspect)
    if shared > 0 and earlier:
        rows.append(
            {
                "host": None,
                "lane": None,
                "pid": None,
                "since_s": None,
                "bytes": shared,
                "why": "sessions of earlier epochs may still write there",
                "freed_by": f"the end of all {earlier} of them",
            }
        )
    return rows


def _row(row: Mapping[str, Any]) -> str:
    """Format one row of the quarantine in lines of at most 78 columns."""
    from beluga.pool import show_size

    if row["host"] is None:
        row_text = f"quarantined: {show_size(row['bytes'])}"
    else:
        process = "" if row["pid"] is None else f", process {row['pid']}"
        size = "its lane" if row["bytes"] is None else f"its lane and {show_size(row['bytes'])}"
        row_text = (
            f"quarantined: {size} of the session on lane {row['lane']} (host {row['host']}"
            f"{process}), suspect for {_span(row['since_s'])}"
        )
    text = f"{row_text}: {row['why']}. Freed by: {row['freed_by']}."
    return textwrap.fill(text, min(_WIDTH, width()), subsequent_indent="  ")


def _name(session: SessionView, directory: Path) -> str | None:
    """Return the name of a session's process if it is on this host, where the directory has its
    lock.
    """
    if session.pid is None or not (directory / f"alive-{session.nonce}").exists():
        return None
    try:
        return Path(f"/proc/{session.pid}/comm").read_text(errors="replace").strip()[:_NAME_MAX]
    except OSError:
        return None


def _span(seconds: float) -> str:
    """Format a duration: 0.1s, 12s, 5m, 3h, 2d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.1f}s" if seconds < 1 else f"{seconds:.0f}s"


def _short(count: int) -> str:
    """Format a count in at most five characters."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= 10 * size:
            return f"{count / size:.0f}{unit}"
    return str(count)
