# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga trace``: the last calls that a server handled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beluga.cli.frame import BadParameter, Legend, Option, explains
from beluga.cli.options import Json, PoolPaths, as_bad_value, runtime_dir_of
from beluga.cli.output import print_json, print_note, print_row
from beluga.errors import BadValueError, NoTraceError

if TYPE_CHECKING:
    from beluga.rpc import CallTrace, TracedCall


_FOLLOW_S = 0.25
_LATEST_S = 4e9  # the latest time that can be formatted
_LEGEND = Legend(
    {
        "time": "when the server started to handle the call",
        "host:pid:lane": "the caller: the host's number, the process (- on another host), the lane",
        "method": "the method",
        "keys": "the number of keys",
        "us": "its time in the server's loop in microseconds; a dash if unfinished",
        "bytes": "the total size of request and reply",
        "status": "ok, the returned error, or unfinished",
    }
)
_ROW = "{:<15} {:<15} {:<15} {:>4} {:>8} {:>7} {}"  # 80 columns with "unfinished"
_HEADING = _ROW.format(*_LEGEND)


@explains(_LEGEND)
def trace(
    pool: PoolPaths = None,
    last: Annotated[int, Option(min=1)] = 50,
    slow: Annotated[float, Option(min=0)] = 0.0,
    method: str = "",
    session: str = "",
    slowest: bool = False,
    before: bool = False,
    follow: Annotated[bool, Option("--follow", "-f")] = False,
    json: Json = False,
) -> None:
    """Show the last calls that the pool's server handled, even if it was killed.

    The server keeps some tens of thousands of calls in a file of the pool's runtime directory, on
    its own host. The times are those in the server's loop, without the round trip. A call that is
    "unfinished" is being handled, or the server died in it.

    --last: The largest number of calls to show.
    --slow MS: Only calls that took at least this many ms.
    --method: Only calls of this method, such as lookup.
    --session: Only calls of a session: pid:N, host:N, lane:N, or its 16 hex digits.
    --slowest: Show the calls that took longest.
    --before: Show the calls of the previous server.
    --follow: Continue with new calls until Ctrl-C.
    """
    from beluga.rpc import method_names, read_trace

    if method and method not in method_names() and not method.isdecimal():
        raise BadParameter(
            f"--method is {method!r}; give one of {', '.join(method_names())}, or the number of a "
            "program's own method"
        )
    if follow and (before or slowest):
        raise BadParameter("--follow excludes --before and --slowest; drop one")
    directory = runtime_dir_of(pool)
    recorded = read_trace(directory, before=before)
    if slowest:
        calls = recorded.slowest(last)
    else:
        with as_bad_value(BadValueError):
            calls = recorded.calls(
                last=last, slow_s=slow / 1e3, method=method or None, session=session or None
            )
    if follow:
        _follow(directory, recorded, calls, json, slow_s=slow / 1e3, method=method, session=session)
    elif json:
        print_json(
            {
                "epoch": recorded.epoch,
                "pid": recorded.pid,
                "ended": recorded.ended,
                "alive": recorded.alive,
                "takeover": asdict(recorded.takeover),
                "calls": [asdict(call) for call in calls],
            }
        )
    else:
        print_note(_headline(recorded))
        print_row(_HEADING)
        _show(calls)


def _headline(trace: CallTrace) -> str:
    if trace.alive:
        state = "serves"
    elif trace.ended:
        state = f"stopped cleanly at {_clock(trace.seen_s)}"
    else:
        state = f"was killed, or hangs: its last update was at {_clock(trace.seen_s)}"
    server = f"server {trace.pid}, epoch {trace.epoch}: it {state}; {trace.count:,} calls"
    return f"{server}\nit took over because {trace.takeover}"


def _follow(
    directory: Path,
    trace: CallTrace,
    calls: Sequence[TracedCall],
    json: bool,
    *,
    slow_s: float,
    method: str,
    session: str,
) -> None:
    """Show these calls, then new ones, including those of the next server."""
    from beluga.rpc import read_trace

    if not json:
        print_row(_HEADING)
    epoch, newest = trace.epoch, trace.newest
    while True:
        for call in calls:
            if call.seconds is not None and json:
                print_json(asdict(call), lines=True)
        if not json:
            _show([call for call in calls if call.seconds is not None])
        time.sleep(_FOLLOW_S)
        with suppress(NoTraceError):  # a server is starting
            trace = read_trace(directory)
        if trace.epoch != epoch:
            print_note(_headline(trace))
            epoch, newest = trace.epoch, 0
        calls = trace.calls(
            slow_s=slow_s, method=method or None, session=session or None, newer_than=newest
        )
        newest = max(newest, trace.newest)


def _show(calls: Sequence[TracedCall]) -> None:
    for call in calls:
        caller = f"{call.host}:{call.pid or '-'}:{call.lane}"
        us = "-" if call.seconds is None else f"{call.seconds * 1e6:,.1f}"
        at = _clock(call.time_s)
        print_row(_ROW.format(at, caller, call.method, call.keys, us, call.bytes, call.status))


def _clock(seconds: float) -> str:
    """Format a time of day; an invalid time becomes the first or last one."""
    seconds = min(max(seconds, 0.0), _LATEST_S)
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{int(seconds % 1 * 1e6):06}"
