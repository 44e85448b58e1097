# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The last calls that a server handled, for a post-mortem (``csrc/rpc/trace.h``).

The server writes them to a file in the pool's runtime directory. Any process of its host may read
the file, whether the server runs or was killed. A starting server keeps its predecessor's file
under another name. The content is untrusted and only displayed.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from beluga._ffi import core, ffi, lib, record_dtype
from beluga.arguments import StrPath, path_of
from beluga.errors import BadValueError, NoTraceError, status_name
from beluga.rpc.server import method_name, takeover_cause

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from beluga._numpy import np

TRACE, TRACE_BEFORE = "trace", "trace.1"
"""File names: of the last server, and of the one before it."""

_ENTRY_SIZE = ffi.sizeof("bl_trace_entry")
_MAGIC = b"BLTRACE2"
_ENTRIES_MAX = 1 << 20  # larger files are not read
_RATE_NS = 1_000_000  # below this interval of two clock readings, their rate is unknown
_ALIVE_S = 2.0  # a server updates its trace every 20 ms


@dataclasses.dataclass(frozen=True, slots=True)
class TracedCall:
    """One call: when its handling began, its session, and its outcome.

    ``seconds`` is the time in the server's loop. It is None for a call that has not ended: the call
    is still being handled, or the server died in it. ``status`` is ok or the name of an error.
    ``pid`` is None for sessions of other hosts.
    """

    sequence: int
    time_s: float
    host: int
    pid: int | None
    lane: int
    nonce: str
    method: str
    keys: int
    status: str
    seconds: float | None
    bytes: int


class CallTrace:
    """The calls in a trace file, and the server that handled them.

    ``ended`` is true if the server stopped cleanly. ``seen_s`` is when it last updated the file.
    ``count`` is the number of calls in the file. ``takeover`` describes the server before it, and
    the reason of the takeover.
    """

    def __init__(self, head: core.bl_trace_head, entries: NDArray[np.void]) -> None:
        self.epoch, self.pid, self.ended = int(head.epoch), int(head.pid), bool(head.ended)
        self.takeover = takeover_cause(head.takeover)
        self.seen_s = head.last.realtime_ns / 1e9
        self._updated_s = head.last.monotonic_ns / 1e9
        self._ticks, self._now_ns = int(head.last.ticks), int(head.last.realtime_ns)
        ticks = self._ticks - int(head.first.ticks)
        passed_ns = int(head.last.monotonic_ns) - int(head.first.monotonic_ns)
        self._rate = passed_ns / ticks if ticks > 0 and passed_ns > _RATE_NS else 1.0
        self._entries = _whole(entries)

    @property
    def alive(self) -> bool:
        """Whether the server updated the file within the last 2 seconds, by the clock of this boot,
        which nobody sets.
        """
        return not self.ended and abs(time.monotonic() - self._updated_s) < _ALIVE_S

    @property
    def count(self) -> int:
        """The number of calls in the file."""
        return len(self._entries)

    @property
    def newest(self) -> int:
        """The sequence number of the last completed call; 0 if there is none."""
        whole = self._entries["sequence"][self._entries["ended"] != 0]
        return int(whole[-1]) if len(whole) else 0

    def calls(
        self,
        *,
        last: int | None = None,
        slow_s: float = 0.0,
        method: str | None = None,
        session: str | None = None,
        newer_than: int = 0,
    ) -> list[TracedCall]:
        """Return calls, oldest first: the ``last`` ones of those that took at least ``slow_s``,
        have this method, and belong to this session: ``pid:N``, ``host:N``, ``lane:N``, or its
        nonce.

        Raises :class:`~beluga.errors.BadValueError` for an invalid session.
        """
        found = self._entries[self._entries["sequence"] > newer_than]
        if slow_s > 0:
            found = found[
                (found["ended"] == 0) | (found["ticks_taken"] * self._rate >= slow_s * 1e9)
            ]
        if method is not None:
            numbers = [n for n in np.unique(found["method"]) if method_name(int(n)) == method]
            found = found[np.isin(found["method"], numbers)]
        if session is not None:
            field, value = _session(session)
            found = found[found[field] == value]
        if last is not None:
            found = found[max(len(found) - last, 0) :]
        return [self._call(one) for one in found]

    def slowest(self, count: int) -> list[TracedCall]:
        """Return the calls that took longest, slowest first. A call that has not ended precedes all
        others.
        """
        taken = np.where(self._entries["ended"] == 0, np.inf, self._entries["ticks_taken"])
        return [self._call(self._entries[at]) for at in np.argsort(-taken)[: max(count, 0)]]

    def _call(self, one: np.void) -> TracedCall:
        ended = bool(one["ended"])
        return TracedCall(
            sequence=int(one["sequence"]),
            time_s=(self._now_ns + (int(one["ticks"]) - self._ticks) * self._rate) / 1e9,
            host=int(one["host"]),
            pid=int(one["pid"]) or None,
            lane=int(one["lane"]),
            nonce=f"{int(one['nonce']):016x}",
            method=method_name(int(one["method"])),
            keys=int(one["keys"]),
            status=status_name(int(one["status"])) if ended else "unfinished",
            seconds=int(one["ticks_taken"]) * self._rate / 1e9 if ended else None,
            bytes=int(one["request_size"]) + int(one["reply_size"]),
        )


def read_trace(directory: StrPath, *, before: bool = False) -> CallTrace:
    """Read the trace of the last server of a pool, or of the one before, from its runtime
    directory.

    Raises :class:`~beluga.errors.NoTraceError` if the file does not exist or is not a trace.
    """
    directory = path_of("directory", directory)
    path = directory / (TRACE_BEFORE if before else TRACE)
    try:
        with path.open("rb") as file:
            data = file.read(lib.BL_TRACE_HEAD_SIZE + _ENTRIES_MAX * _ENTRY_SIZE + 1)
    except FileNotFoundError:
        raise NoTraceError(
            f"{path} does not exist; run this on the server's own host, where it writes its trace "
            "into the pool's runtime directory"
        ) from None
    head = ffi.new("bl_trace_head *")
    size = ffi.sizeof("bl_trace_head")
    ffi.memmove(head, data[:size].ljust(size, b"\0"), size)
    count = int(head.entry_count)
    if (
        data[: len(_MAGIC)] != _MAGIC
        or head.entry_size != _ENTRY_SIZE
        or count == 0
        or len(data) != lib.BL_TRACE_HEAD_SIZE + count * _ENTRY_SIZE
    ):
        raise NoTraceError(f"{path} is not a trace of this version of Beluga")
    kind = record_dtype("bl_trace_entry")
    return CallTrace(head, np.frombuffer(data, kind, offset=lib.BL_TRACE_HEAD_SIZE))


def _whole(entries: NDArray[np.void]) -> NDArray[np.void]:
    """Return the intact entries and the one that has not ended, oldest first."""
    sequence, ended = entries["sequence"], entries["ended"]
    here = sequence % len(entries) == np.arange(len(entries), dtype=np.uint64)
    here &= (sequence > 0) & ((ended == sequence) | (ended == 0))
    found = entries[here]
    found = found[np.argsort(found["sequence"])]
    torn = found["ended"] == 0
    torn[-1:] = False  # only the last call can be unfinished
    whole: NDArray[np.void] = found[~torn]
    return whole


def _session(text: str) -> tuple[str, int]:
    """Return the field and value that select a session."""
    field, colon, value = text.rpartition(":")
    try:
        if not colon:
            return "nonce", int(text, 16)
        if field in ("pid", "host", "lane"):
            return field, int(value)
    except ValueError:
        pass
    raise BadValueError(
        f"{text!r} does not name a session; give pid:N, host:N, lane:N or 16 hex digits"
    )
