# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Staged copies: kernels copy between fragments and a buffer in GPU memory, and a copy engine
copies between the buffer and the pool. Each has a stream, so they run concurrently.

A plan's bytes are cut into groups. While a copy engine moves a group, a kernel gathers the next
group or scatters the previous one. Events order the two streams; the CPU waits for neither. A plan
that is larger than a buffer alternates between two buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.engines.cuda.driver import Driver
from beluga.transfer.engines.cuda.launch import Launched, Launcher
from beluga.transfer.engines.cuda.parts import Packed
from beluga.transfer.engines.cuda.tables import make_tables, tile_spans
from beluga.transfer.engines.cuda.windows import Bases
from beluga.transfer.plan.plan import LINE_SIZE

# A copy engine moves about this many bytes at a time. Starting a copy takes a microsecond or two,
# which is little compared with 20 us at 55 GB/s; and a block of 2.5 MiB is still cut in two.
GROUP_SIZE = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class DirectedStream:
    """A stream and the direction of its copies: ``write`` gathers, otherwise they scatter."""

    write: bool
    stream: int


class Staging:
    """Queues work of two streams on one buffer. Its own streams are for copy engines only."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher, self._driver = launcher, launcher.driver
        self._streams: dict[bool, int] = {}

    def copies(self, *, write: bool) -> int:
        """Return the stream for the copies of a direction."""
        if write not in self._streams:
            self._streams[write] = self._driver.make_stream(urgent=not write)
        return self._streams[write]

    def move(
        self, packed: Packed, runs: NDArray[np.void], buffer: int, directed: DirectedStream
    ) -> Launched:
        """Queue a part of a plan on both streams.

        The ``buffer`` must be free on the stream that fills it. ``runs`` are the part's bytes in
        the pool, by GPU address. A write ends on the stream of copies, and a read on
        ``directed.stream``.
        """
        tables = make_tables(packed.plan, write=directed.write)
        starts, ends = tile_spans(tables)
        edges = starts if directed.write else ends
        order = np.argsort(edges, kind="stable")
        tables = dataclasses.replace(tables, tiles=tables.tiles[order])
        edges, copies, launcher = edges[order], self.copies(write=directed.write), self._launcher
        bases = Bases.flat(buffer)
        launched = launcher.load(tables, bases, write=directed.write, stream=directed.stream)
        first = 0
        for group in groups(runs):
            _, place, size = group[-1]
            # A gather covers tiles that begin in the group, a scatter those that end in it.
            side: Literal["left", "right"] = "left" if directed.write else "right"
            last = int(np.searchsorted(edges, place + size, side=side))
            if directed.write:
                launcher.run(launched, first, last, stream=directed.stream)
                after(self._driver, directed.stream, copies)
            for at, place, size in group:
                pair = (at, buffer + place) if directed.write else (buffer + place, at)
                self._driver.copy(*pair, size, copies)
            if not directed.write:
                after(self._driver, copies, directed.stream)
                launcher.run(launched, first, last, stream=directed.stream)
            first = last
        launcher.fetch(launched, stream=directed.stream)
        if directed.write:
            after(self._driver, directed.stream, copies)
        return launched

    @property
    def streams(self) -> list[int]:
        """Return the streams that exist."""
        return list(self._streams.values())

    def close(self) -> None:
        for stream in self._streams.values():
            self._driver.end_stream(stream)


def drain(driver: Driver, stream: int) -> None:
    """Wait until all work on the stream has ended."""
    event = driver.make_event()
    driver.record(event, stream)
    driver.wait(event)
    driver.free_event(event)


def after(driver: Driver, first: int, then: int) -> None:
    """Make later work on stream ``then`` wait for the present work on stream ``first``."""
    event = driver.make_event()
    driver.record(event, first)
    driver.follow(then, event)
    driver.free_event(event)


def groups(runs: NDArray[np.void]) -> Iterable[list[tuple[int, int, int]]]:
    """Put runs (address, place, size) into groups of about GROUP_SIZE bytes.

    Long runs are cut into equal parts of at least half that size; short runs share a group.
    """
    group: list[tuple[int, int, int]] = []
    held = 0
    for at, place, size in runs.tolist():
        count = max(1, size // GROUP_SIZE)
        edges = [index * size // count // LINE_SIZE * LINE_SIZE for index in range(count)]
        for start, end in zip(edges, [*edges[1:], size], strict=True):
            group.append((at + start, place + start, end - start))
            held += end - start
            if held >= GROUP_SIZE:
                yield group
                group, held = [], 0
    if group:
        yield group
