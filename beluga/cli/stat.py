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
        found, sessions = IndexClient(client).stat(), fetch_sessions(client)
        lower, own = fetch_counters(client), client.stat()
        directory = opened.runtime_dir
    counters = found.as_dict() | {"table_full": _taken(found) >= found.block_count_max}
    others = [one for one in sessions.sessions if one.nonce != f"{own.nonce:016x}"]
    held = _quarantine(found, others, own.epoch)
    if json:
        shown = counters | {
            "epoch": own.epoch,
            "hit_rate": _hit_rate(found),
            "draining": sessions.draining,
            "quota": asdict(sessions.quota),
            "sessions": [asdict(one) | {"name": _name(one, directory)} for one in others],
            "quarantine": held,
        }
        print_json(shown if lower is None else shown | {"lower_tiers": lower})
        return
    print_facts(_summary(found, sessions, others, own.epoch) | _tiers(lower))
    live = [one for one in others if one.state == "live"]
    if live:
        print_table(_CLIENTS, _clients(live, directory), spare=("puts", "pins", "age"), wide=wide)
    for one in held:
        print_line(_row(one))


def _taken(found: IndexStat) -> int:
    return found.block_count + found.grant_count


def _hit_rate(found: IndexStat) -> float | None:
    return found.hit_count / found.lookup_count if found.lookup_count else None


def _summary(
    found: IndexStat, sessions: Sessions, others: Sequence[SessionView], epoch: int
) -> dict[str, object]:
    """Return the counters as a readable summary."""
    from beluga.pool import show_size

    rate = _hit_rate(found)
    suspect = sum(one.state != "live" for one in others)
    clients = sum(one.kind != "server" for one in others) - suspect
    full = found.used_bytes / max(1, found.data_bytes)
    facts: dict[str, object] = {
        "server": f"epoch {epoch}" + (", draining: puts are refused" if sessions.draining else ""),
        "hit rate": "no lookups yet" if rate is None else f"{rate:.1%} of {found.lookup_count:,}",
        "space full": f"{full:.1%} of {show_size(found.data_bytes)}",
        "table full": f"{_taken(found) / max(1, found.block_count_max):.1%} of "
        f"{found.block_count_max:,} blocks",
        "blocks": f"{found.block_count:,}, {show_size(found.block_bytes)}; "
        f"{found.pinned_count:,} pinned, {found.grant_count:,} being written",
        "since takeover": f"{found.commit_count:,} stored, {found.evict_count:,} evicted, "
        f"{found.remove_count:,} removed, {found.refuse_count:,} refused",
        "clients": f"{clients}" + (f", and {suspect} suspect" if suspect else ""),
        "quarantined": show_size(found.held_bytes) if found.held_bytes else "nothing",
    }
    if found.retired_stripe_count:
        facts["retired"] = show_size(_retired(found))
    return facts


def _retired(found: IndexStat) -> int:
    return found.retired_stripe_count * (found.data_bytes // max(1, found.stripe_count))


def _tiers(lower: Mapping[str, Any] | None) -> dict[str, str]:
    """Return a line for each lower tier, and one for pending work."""
    if lower is None:
        return {}
    work = lower.get("work", {})
    removals = work.get("removal_count", 0)
    left = f", {removals:,} removals are not executed yet" if removals else ""
    return {
        f"tier {name}": _tier(counters) for name, counters in lower.get("tiers", {}).items()
    } | {
        "for lower tiers": f"{work.get('dirty_count', 0):,} blocks wait to be offered, "
        f"{work.get('wanted_count', 0):,} are being fetched{left}"
    }


def _tier(counters: Mapping[str, Any]) -> str:
    from beluga.pool import show_size

    parts = []
    if "blocks" in counters:
        used, size = counters.get("used_bytes", 0), counters.get("data_bytes", 0)
        parts.append(f"{counters['blocks']:,} blocks, {show_size(used)} of {show_size(size)}")
    for word in ("saved", "loaded", "missed"):
        parts.append(f"{counters.get(f'{word}_blocks', 0):,} {word}")
    failures = counters.get("failures", counters.get("errors", {}))
    if count := sum(failures.values()) if isinstance(failures, Mapping) else failures:
        parts.append(f"{count:,} failures")
    if counters.get("breaker_state", "closed") != "closed":
        parts.append(f"breaker {counters['breaker_state']}")
    return ", ".join(parts)


def _clients(sessions: Sequence[SessionView], directory: Path) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [
        (
            one.host,
            str(one.pid or "-"),
            one.kind,
            _name(one, directory),
            _span(one.since_s),
            _short(one.call_count),
            _short(one.pin_count),
            _short(one.grant_count),
            _span(one.heartbeat_s),
        )
        for one in sessions
    ]
    return rows


def _quarantine(
    found: IndexStat, sessions: Sequence[SessionView], epoch: int
) -> list[dict[str, Any]]:
    """Return the quarantine: for each suspect session its duration, its reason, and what ends it.

    It is unknown where sessions of earlier epochs write, so their space is quarantined together:
    their ``bytes`` are None, and the last row has the total.
    """
    rows: list[dict[str, Any]] = []
    suspect = [one for one in sessions if one.state != "live"]
    for one in suspect:
        rows.append(
            {
                "host": one.host,
                "lane": one.lane,
                "pid": one.pid,
                "since_s": one.since_s,
                "bytes": one.held_bytes if one.epoch == epoch else None,
                "why": one.why(epoch=epoch),
                "freed_by": one.freed_by(),
            }
        )
    shared = found.held_bytes - sum(one.held_bytes for one in suspect)
    earlier = sum(one.epoch != epoch for one in suspect)
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
        who = f"quarantined: {show_size(row['bytes'])}"
    else:
        process = "" if row["pid"] is None else f", process {row['pid']}"
        size = "its lane" if row["bytes"] is None else f"its lane and {show_size(row['bytes'])}"
        who = (
            f"quarantined: {size} of the session on lane {row['lane']} (host {row['host']}"
            f"{process}), suspect for {_span(row['since_s'])}"
        )
    text = f"{who}: {row['why']}. Freed by: {row['freed_by']}."
    return textwrap.fill(text, min(_WIDTH, width()), subsequent_indent="  ")


def _name(one: SessionView, directory: Path) -> str | None:
    """Return the name of a session's process if it is on this host, where the directory has its
    lock.
    """
    if one.pid is None or not (directory / f"alive-{one.nonce}").exists():
        return None
    try:
        return Path(f"/proc/{one.pid}/comm").read_text(errors="replace").strip()[:_NAME_MAX]
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
