# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands ``beluga quota`` and ``drain``: they change a server while it serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from beluga.cli.frame import BadParameter, Exit, Legend, Option, explains
from beluga.cli.options import Host, Json, PoolPaths, open_pool, runtime_dir_of, size
from beluga.cli.output import print_facts, print_json, print_note, print_table
from beluga.errors import CallTimeoutError, NoServerError

if TYPE_CHECKING:
    from beluga.index import SessionView
    from beluga.rpc import Quota

_LIMITS = {"grants": "grants", "pins": "pins", "bytes": "bytes", "calls": "calls_per_s"}
_WORDS = {
    "grants": "blocks being written",
    "pins": "blocks pinned",
    "bytes": "bytes of both",
    "calls_per_s": "calls per second",
}
_SHARE_FIELDS = ("name", "bytes", "used_bytes", "blocks", "evictions", "hinted_bytes", "hint_bytes")
_LOOK_S = 0.1
_REPORT_AFTER_S = 1.0


_USE = Legend(
    {
        "host": "the session's number among the pool's hosts",
        "pid": "its process on that host",
        "lane": "the number of its lane in the pool",
        "kind": "the kind of its process, such as vllm; a dash until its first report",
        "writing": "the number of blocks it is writing",
        "pinned": "the number of blocks it has pinned",
        "bytes": "the bytes of the pool it is writing and has pinned",
        "calls": "the number of its calls",
    }
)
_SHARES = Legend(
    {
        "share": (
            "the name of a tenant with a share of the pool; others are all tenants without one"
        ),
        "part": "the bytes guaranteed to it",
        "used": "the bytes of its blocks, including those being written",
        "blocks": "the number of its blocks",
        "evicted": "the number of its blocks evicted since this server started",
        "hinted": "how many bytes of its blocks hints favor",
        "hint budget": "how many they may favor",
    }
)
_TENANTS = Legend(
    {
        "namespace": (
            "the fingerprint of a namespace, as in beluga ls --namespaces; others are those that "
            "the server does not count separately"
        ),
        "length": "the size of each of its blocks, in bytes",
        "blocks": "the number of its blocks in the pool",
        "bytes": "the bytes of its blocks",
    }
)


@explains(_USE, _SHARES, _TENANTS)
def quota(
    pool: PoolPaths = None,
    host: Host = None,
    change: Annotated[list[str] | None, Option("--set")] = None,
    json: Json = False,
) -> None:
    """Show the limits of each session and their use, or change the limits.

    A change applies to all sessions at once, until this server ends. The next server starts with
    its own quotas. Sessions keep their present grants and pins. Run changes on the server's host.

    --set LIMIT=N: Change a limit of every session: grants, pins, bytes or calls (per second); 0 for
        no limit. Repeat the option for others.
    """
    from beluga.admin import request_json
    from beluga.index import fetch_sessions
    from beluga.rpc import Client, Quota

    changes = dict(_change(text) for text in change or ())
    if changes:
        now = request_json(runtime_dir_of(pool), "/quota", dict, changes)
        if json:
            print_json({"quota": now})
        else:
            print_facts(_limits(Quota(**now)))
            print_note(
                "this applies until the server ends; to keep it, also give --quota-grants, "
                "--quota-pins, --quota-bytes or --quota-calls to 'beluga serve'"
            )
        return
    with open_pool(pool) as opened, Client(opened, host=host) as client:
        directory = opened.runtime_dir
        listing, own = fetch_sessions(client), f"{client.stat().nonce:016x}"
    others = [session for session in listing.sessions if session.nonce != own]
    tenants, shares = _of_server(directory, "/tenants"), _of_server(directory, "/shares")
    if json:
        print_json(
            {
                "quota": asdict(listing.quota),
                "sessions": [asdict(other) for other in others],
                "shares": shares,
                "tenants": tenants,
            }
        )
        return
    print_facts(_limits(listing.quota))
    if others:
        print_table(_USE, _use(others))
    if shares and len(shares) > 1:
        rows = [[share[name] for name in _SHARE_FIELDS] for share in shares]
        print_table(_SHARES, rows, title="shares of tenants")
    if tenants:
        print_table(_TENANTS, [_tenant(tenant) for tenant in tenants], title="namespaces")


def _change(text: str) -> tuple[str, int]:
    from beluga.rpc import Quota

    name, _, value = text.partition("=")
    if name not in _LIMITS:
        raise BadParameter(f"--set is {text!r}; give LIMIT=N with one of {', '.join(_LIMITS)}")
    if name == "bytes":
        number = 0 if value == "0" else size(value)
    elif value.isascii() and value.isdecimal():
        number = int(value)
    else:
        raise BadParameter(f"--set {name}={value} is invalid; give a whole number")
    try:
        Quota(**{_LIMITS[name]: number})
    except ValueError as error:
        raise BadParameter(f"--set {text}: {error}") from None
    return _LIMITS[name], number


def _limits(limits: Quota) -> dict[str, object]:
    """Return the limits of each session, for display."""
    from beluga.pool import show_size

    values = asdict(limits)
    values["bytes"] = show_size(limits.bytes) if limits.bytes else 0
    return {f"{word} at most": values[name] or "no limit" for name, word in _WORDS.items()}


def _use(sessions: Sequence[SessionView]) -> list[Sequence[object]]:
    return [
        (
            session.host,
            str(session.pid or "-"),
            session.lane,
            session.kind,
            session.grant_count,
            session.pin_count,
            session.bytes,
            session.call_count,
        )
        for session in sessions
    ]


def _of_server(directory: Path, path: str) -> list[dict[str, Any]] | None:
    """Return rows of the server's admin endpoint, or None if it is on another host."""
    from beluga.admin import request_json

    try:
        return request_json(directory, path, list)
    except NoServerError:
        return None


def _tenant(tenant: dict[str, Any]) -> list[object]:
    name = f"{tenant['fingerprint']:016x}" if tenant["length"] else "others"
    length = tenant["length"] or None
    return [name, length, tenant["block_count"], tenant["block_count"] * tenant["length"]]


def drain(
    pool: PoolPaths = None,
    undo: bool = False,
    timeout: Annotated[float, Option(min=0)] = 0,
    json: Json = False,
) -> None:
    """Refuse new blocks, and wait until stopping the pool's server loses nothing.

    Puts fail with DrainingError, which engines treat like a full pool; gets continue. The command
    waits until each running put is committed or its session has ended and, if the server has lower
    tiers, until every block has been offered to them. The exit status is 1 if some blocks are only
    in the pool then, because the tiers are too small. The draining ends with the server. Run this
    on the server's host.

    --undo: Accept new blocks again.
    --timeout: Seconds to wait; 0: no limit.
    """
    from beluga.admin import request_json

    directory = runtime_dir_of(pool)
    state = request_json(directory, "/drain", dict, {"draining": not undo})
    if undo:
        if json:
            print_json(state)
        else:
            print_note("new blocks are accepted again")
        return
    started, printed_s = time.monotonic(), 0.0
    while not state["done"] and not state["failure"]:
        now = time.monotonic()
        if timeout and now > started + timeout:
            raise CallTimeoutError(
                f"not drained in {timeout:g} s: {_progress(state)}; the server continues (see "
                "'beluga quota' for sessions that write); cancel with 'beluga drain --undo'"
            )
        if not json and now > printed_s + _REPORT_AFTER_S:
            print_note(_progress(state))
            printed_s = now
        time.sleep(_LOOK_S)
        state = request_json(directory, "/drain", dict)
        if not state["draining"] and not state["done"] and now > started + _REPORT_AFTER_S:
            raise NoServerError(
                "another command has undone this, or another server has taken over; check 'beluga "
                "stat'"
            )
    if state["failure"]:
        raise NoServerError(f"draining has failed: {state['failure']}")
    if json:
        print_json(state)
    else:
        print_note(_drained(state))
    if state["missing"]:
        raise Exit(1)


def _progress(state: dict[str, Any]) -> str:
    states = [f"{state['writing']:,} blocks are being written"]
    if state["looked"] is not None:
        states.append(
            f"{state['dirty']:,} wait for a lower tier, {state['looked']:,} of {state['blocks']:,} "
            "are compared with it"
        )
    return ", ".join(states)


def _drained(state: dict[str, Any]) -> str:
    from beluga.pool import show_size

    if state["looked"] is None:
        return (
            f"drained: nothing is being written; {state['blocks']:,} blocks stay in the pool's "
            "memory ('beluga stop' loses none)"
        )
    text = f"drained: nothing is being written; {state['looked']:,} blocks were compared"
    if state["missing"]:
        more = show_size(state["missing_bytes"])
        return (
            f"{text}, and {state['missing']:,} of them are only in the pool, for which the lower "
            f"tiers need {more} more"
        )
    return f"{text}, and all of them are in a lower tier"
