# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Counters of client processes, which report them to the server.

Only a client can measure how long a get took, how many tokens it saved, or that a reader found a
stale line. It sends the increments with an extra call, at most every :data:`INTERVAL_S` seconds and
right after another call, so an idle client sends nothing. The server adds them up by kind of client
(``csrc/rpc/report.c``), and its exporter shows the sums. A report that fails is lost, so no
increment counts twice.

The order of :data:`Figure` and :class:`Operation` is the order in the call. Append new ones only,
so that clients and servers of different versions stay compatible.
"""

from __future__ import annotations

import bisect
import enum
import struct
import time
from collections.abc import Sequence
from typing import Any, cast

from beluga._ffi import ffi, lib

INTERVAL_S = 5.0

KINDS = ("other", "vllm", "sglang", "lmcache", "replay")
"""The kinds of clients; the call carries the index."""

SECONDS = (
    *(10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3),
    *(5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 1.0),
)
"""Upper bounds of the histograms' buckets, in seconds."""


# The counters of a report: bl_client_figures of csrc/api/figures.h, in upper case.
Figure: Any = cast("Any", enum.IntEnum)(
    "Figure", [name.upper() for name, _ in ffi.typeof("bl_client_figures").fields], start=0
)


class Operation(enum.IntEnum):
    """The operations with a latency histogram; the value is the index after the counters."""

    GET = 0
    PUT = 1
    LOOKUP = 2


TIME_FIGURES = len(SECONDS) + 2
"""Numbers of one histogram: a count per bound, one above the last bound, and total nanoseconds."""

REPORT_FIGURES = len(Figure) + len(Operation) * TIME_FIGURES
assert REPORT_FIGURES <= lib.BL_REPORT_FIGURES  # noqa: S101  else the server rejects reports


# Plain ints: indexing with an enum member is slower.
_REQUESTED, _HIT = int(Figure.REQUESTED_BLOCKS), int(Figure.HIT_BLOCKS)
_STORED, _PRESENT = int(Figure.STORED_BLOCKS), int(Figure.PRESENT_BLOCKS)
_REFUSED, _WRITTEN = int(Figure.REFUSED_BLOCKS), int(Figure.WRITTEN_BYTES)
_READ, _FLUSHED = int(Figure.READ_BYTES), int(Figure.FLUSHED_BYTES)
_TIMES = len(Figure)
_GET, _PUT, _LOOKUP = (_TIMES + operation * TIME_FIGURES for operation in Operation)


class Report:
    """Counts of one session since its last report. Not locked: concurrent increments may be
    lost.
    """

    def __init__(self) -> None:
        self.kind = KINDS[0]
        self._figures = [0] * REPORT_FIGURES
        self._due_s = time.perf_counter() + INTERVAL_S

    def add(self, figure: int, amount: int = 1) -> None:
        """Increase a counter."""
        self._figures[figure] += amount

    # Each of the next three counts an operation that began at ``started``
    # (:func:`time.perf_counter`) and returns whether a report is due. They are single calls because
    # every operation makes one.

    def got(self, requested: int, hits: int, size: int, flushed: int, started: float) -> bool:
        """Count a get of ``size`` bytes."""
        figures = self._figures
        figures[_REQUESTED] += requested
        figures[_HIT] += hits
        figures[_READ] += size
        figures[_FLUSHED] += flushed
        return self._took(_GET, started)

    def put(self, stored: int, present: int, refused: int, size: int, started: float) -> bool:
        """Count a put that wrote ``size`` bytes."""
        figures = self._figures
        figures[_STORED] += stored
        figures[_PRESENT] += present
        figures[_REFUSED] += refused
        figures[_WRITTEN] += size
        return self._took(_PUT, started)

    def looked_up(self, started: float) -> bool:
        """Count a lookup of blocks."""
        return self._took(_LOOKUP, started)

    def _took(self, first: int, started: float) -> bool:
        now, figures = time.perf_counter(), self._figures
        figures[first + bisect.bisect_left(SECONDS, now - started)] += 1
        figures[first + TIME_FIGURES - 1] += int((now - started) * 1e9)
        return now >= self._due_s

    def saved(self, tokens: int, seconds: float = 0.0) -> None:
        """Count tokens that an engine loaded instead of computing, and the seconds this saved."""
        self._figures[Figure.SAVED_TOKENS] += tokens
        self._figures[Figure.SAVED_NS] += int(seconds * 1e9)

    @property
    def due(self) -> bool:
        """Whether a report is due."""
        return time.perf_counter() >= self._due_s

    def take(self) -> bytes | None:
        """Return the request of a report and reset the counts; None if all are zero."""
        self._due_s = time.perf_counter() + INTERVAL_S
        figures, self._figures = self._figures, [0] * REPORT_FIGURES
        if not any(figures):
            return None
        return struct.pack(f"={1 + REPORT_FIGURES}Q", KINDS.index(self.kind), *figures)

    def never(self) -> None:
        """Disable reports, because the server does not support them."""
        self._due_s = float("inf")


class ReportTotals:
    """Sums of the reports of all clients of one kind."""

    def __init__(self, figures: Sequence[int]) -> None:
        self._figures = figures

    def __getitem__(self, figure: int) -> int:
        return int(self._figures[figure])

    def __bool__(self) -> bool:
        return any(self._figures)

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name, as in ``bl_client_figures``."""
        return {figure.name.lower(): int(self._figures[figure]) for figure in Figure}

    def times(self, operation: Operation) -> tuple[tuple[int, ...], float]:
        """Return the bucket counts of an operation's histogram, and its total seconds."""
        first = len(Figure) + operation * TIME_FIGURES
        last = first + TIME_FIGURES - 1
        return tuple(int(count) for count in self._figures[first:last]), self._figures[last] / 1e9
