# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The sessions of a pool's server, what each holds, and which are quarantined."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING

from beluga._ffi import ffi, lib
from beluga.errors import BadReplyError
from beluga.rpc import KINDS, Quota

if TYPE_CHECKING:
    from beluga._ffi import core
    from beluga.rpc import Client

_STATES = {lib.BL_SESSION_LIVE: "live", lib.BL_SESSION_SUSPECT: "suspect"}
_TRUST = {lib.BL_SESSION_WATCHED: "watched", lib.BL_SESSION_HEARTBEAT: "heartbeat"}
_PAGES_MAX = 4096  # replies in one list of sessions


@dataclasses.dataclass(frozen=True, slots=True)
class SessionView:
    """One session in the server's view.

    ``state`` is live, or suspect: the server cannot rule out that it still writes, so its lane and
    ``held_bytes`` are quarantined. ``since_s`` is the time in that state. ``trust`` is how the
    server detects its end: watched (its process is on the server's host), heartbeat (only a stopped
    heartbeat, which proves nothing), or broken (the memory of its lane fails). ``pid`` is None
    where the server cannot see the process. ``kind`` is one of ``KINDS``, or server for sessions of
    the server's own process, such as those that move blocks between tiers. ``bytes`` is the size of
    its grants and pinned blocks.
    """

    nonce: str
    epoch: int
    lane: int
    host: int
    pid: int | None
    kind: str
    state: str
    trust: str
    since_s: float
    heartbeat_s: float
    call_count: int
    grant_count: int
    pin_count: int
    bytes: int
    held_bytes: int

    @classmethod
    def of(cls, view: core.bl_session_view, server_pid: int) -> SessionView:
        """Convert a cffi ``bl_session_view`` of a server with this pid."""
        kind = KINDS[view.kind] if view.kind < len(KINDS) else str(view.kind)
        return cls(
            nonce=f"{view.nonce:016x}",
            epoch=view.epoch,
            lane=view.lane,
            host=view.host,
            pid=view.pid or None,
            kind="server" if view.pid == server_pid else kind,
            state=_STATES.get(view.state, "unknown"),
            trust=_TRUST.get(view.trust, "broken"),
            since_s=view.since_ns / 1e9,
            heartbeat_s=view.heartbeat_ns / 1e9,
            call_count=view.call_count,
            grant_count=view.grant_count,
            pin_count=view.pin_count,
            bytes=view.bytes,
            held_bytes=view.held_bytes,
        )

    def why(self, *, epoch: int) -> str:
        """Return why a session is suspect, for the server of this epoch."""
        if self.trust == "broken":
            return "the memory of its lane fails"
        if self.epoch != epoch:
            return f"it is from epoch {self.epoch}, has not attached again and is not proven dead"
        return f"its heartbeat stopped {self.heartbeat_s:,.0f} s ago, and it is not proven dead"

    def freed_by(self) -> str:
        """Return what ends the quarantine of a suspect session."""
        process = "the process" if self.pid is None else f"process {self.pid}"
        if self.trust in ("watched", "broken"):
            return f"the end of {process} on host {self.host}"
        return (
            f"the session attaches again or closes; a reboot of host {self.host}; or, when "
            f"that host is switched off, a new server with 'beluga serve --declare-gone'"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Sessions:
    """The sessions, their quota, and whether the pool is being drained."""

    sessions: tuple[SessionView, ...]
    quota: Quota
    draining: bool


def fetch_sessions(client: Client) -> Sessions:
    """Request the list of sessions from the server, from any host. Raises RpcError."""
    found: list[SessionView] = []
    first = 0
    for _ in range(_PAGES_MAX):
        head, views = _fetch_page(client, first)
        found += views
        if not head.more or not views:
            break
        first = views[-1].lane + 1
    limits = head.quota
    quota = Quota(
        grants=limits.grant_count,
        pins=limits.pin_count,
        bytes=limits.bytes,
        calls_per_s=limits.calls_per_s,
    )
    return Sessions(tuple(found), quota, bool(head.draining))


def _fetch_page(client: Client, first: int) -> tuple[core.bl_sessions_reply, list[SessionView]]:
    reply = client.call(lib.BL_METHOD_SESSIONS, struct.pack("=I", first))
    start, size = ffi.sizeof("bl_sessions_reply"), ffi.sizeof("bl_session_view")
    head = ffi.new("bl_sessions_reply *")
    if len(reply) < start:
        raise BadReplyError("the list of sessions is truncated")
    ffi.memmove(head, reply, start)
    if len(reply) != start + head.count * size:
        raise BadReplyError("the list of sessions has another length than its header")
    views = ffi.new("bl_session_view[]", head.count)
    ffi.memmove(views, reply[start:], head.count * size)
    return head, [SessionView.of(views[place], head.pid) for place in range(head.count)]
