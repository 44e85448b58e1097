# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The scene of the copying benchmark: an engine's paged memory, a pool's blocks, and plans between
them.

Engine memory has the layout of real engines: a tensor per layer and K or V, with pages in it. A
block's fragments are at least a block's length apart. In the pool a block is one run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from beluga.pool import Pool
from beluga.transfer import CopyEngine, Plan, plan_blocks, plan_rows

from .. import _limit
from .._limit import ffi
from . import drive
from .drive import Driver, Load
from .region import region_of
from .tokens import Model, selection

_PRIVATE_SEED = 7


@dataclass(frozen=True)
class Work:
    """One kind of copy at many positions: operation i is ``plans[i]``.

    The limit's rows are in two arrays of addresses, ``row_count`` rows of ``row_size`` bytes for
    each operation. ``offsets`` are the blocks' offsets in the pool.
    """

    case: str
    plans: list[Plan]
    private_addresses: NDArray[np.uint64]
    pool_addresses: NDArray[np.uint64]
    row_size: int
    row_count: int
    fragment_size: int
    fragment_count: int
    offsets: list[int]

    @property
    def size(self) -> int:
        """The bytes that an operation moves, which equals the size of the limit's rows."""
        return self.fragment_size * self.fragment_count

    def limits(self, count: int) -> list[Driver]:
        """Return drivers of ``limit_gather`` or ``limit_scatter`` for the same copies in ``count``
        threads.
        """
        rows = ffi.new(
            "limit_rows *",
            {
                "private_places": ffi.cast("uint64_t *", self.private_addresses.ctypes.data),
                "pool_places": ffi.cast("uint64_t *", self.pool_addresses.ctypes.data),
                "size": self.row_size,
            },
        )
        name = "gather" if self.case == "gather_write" else "scatter"
        operation = drive.bare(name, int(ffi.cast("uintptr_t", rows)))
        firsts = np.arange(len(self.plans), dtype=np.uint64) * np.uint64(self.row_count)
        size = self.row_size * self.row_count
        drivers = [
            LimitDriver(Load(operation, np.ascontiguousarray(firsts[i::count]), size), rows)
            for i in range(count)
        ]
        return list(drivers)

    def ours(self, engine: CopyEngine) -> Callable[[Plan], None]:
        """Return a function that executes one plan with an engine."""
        move = engine.gather_write if self.case == "gather_write" else engine.scatter_read
        return lambda plan: move(plan).wait()


class LimitDriver(Driver):
    """A driver that keeps the struct alive that its operation reads."""

    def __init__(self, load: Load, rows: _limit.limit_rows) -> None:
        super().__init__(load)
        self._rows = rows


_Where = TypeVar("_Where")


class Runner(Generic[_Where]):
    """Times one operation after the other, each at the next position."""

    def __init__(self, operation: Callable[[_Where], None], positions: Sequence[_Where]) -> None:
        self._operation = operation
        self._positions: Iterator[_Where] = itertools.cycle(positions)

    def count(self, count: int) -> float:
        """Run ``count`` operations. Returns operations per second."""
        operation, positions = self._operation, list(itertools.islice(self._positions, count))
        start = perf_counter_ns()
        for position in positions:
            operation(position)
        return count * 1e9 / (perf_counter_ns() - start)

    def sample(self, count: int) -> NDArray[np.uint64]:
        """Run ``count`` operations. Returns the nanoseconds of each."""
        times = np.zeros(count + 1, np.uint64)
        times[0] = perf_counter_ns()
        for i, position in enumerate(itertools.islice(self._positions, count), 1):
            self._operation(position)
            times[i] = perf_counter_ns()
        return np.diff(times)


class Scene:
    """A pool, touched engine memory, and the copies between them.

    At most ``span`` bytes of each are used.
    """

    def __init__(self, pool: Pool, span: int) -> None:
        region = region_of(pool)
        self.pool = pool
        self.span = min(span, region.piece)
        self._data, self._base = pool.geometry.data_offset, region.base
        generator = np.random.default_rng(_PRIVATE_SEED)
        raw = generator.integers(0, 256, self.span + 4096, np.uint8)
        start = -raw.ctypes.data % 4096  # begins at a cache line, as tensors do
        self.memory: NDArray[np.uint8] = raw[start : start + self.span]
        pool.prefault()

    def dense(self, case: str, fragment: int, count: int, chunk_size: int = 0) -> Work:
        """Return copies of whole blocks with ``count`` fragments of ``fragment`` bytes, in random
        order.
        """
        pages, starts = self._blocks(fragment, count)
        fragments = np.arange(count) * fragment
        offsets = np.uint64(self._data) + starts
        plans = [
            plan_blocks(row[None], np.full(count, fragment), offset[None], chunk_size=chunk_size)
            for row, offset in zip(pages, offsets, strict=True)
        ]
        pool_addresses = np.uint64(self._base) + starts[:, None] + fragments.astype(np.uint64)
        return Work(
            case,
            plans,
            pages.reshape(-1),
            pool_addresses.reshape(-1),
            fragment,
            count,
            fragment,
            count,
            offsets.tolist(),
        )

    def sparse(self, model: Model, chunk_size: int = 0) -> Work:
        """Return copies of rows of 16 tokens of a context, most of which have no neighbor.

        With checksums the limit reads the chunks with these rows.
        """
        fragment, length = model.fragment_size, model.block_size
        _, starts = self._blocks(fragment, model.row_count)
        offsets = np.uint64(self._data) + starts
        plans, near, far = [], [], []
        for turn in range(len(starts)):
            tokens = selection(turn, len(starts) * model.block_tokens)
            blocks = np.repeat(tokens // model.block_tokens, model.row_count)
            at = (tokens % model.block_tokens * model.row_size)[:, None]
            inside = (np.arange(model.row_count) * fragment + at).reshape(-1)
            # Sparse reads go to separate pages, in which each layer's tokens are adjacent.
            to = (np.arange(model.row_count) * len(tokens))[None, :] + np.arange(len(tokens))[
                :, None
            ]
            targets = np.uint64(self.memory.ctypes.data) + np.uint64(model.row_size) * to.reshape(
                -1
            ).astype(np.uint64)
            sizes = np.full(len(targets), model.row_size)
            checksums = None
            if chunk_size:
                checksums = np.zeros((len(starts), -(-length // chunk_size)), np.uint32)
            plans.append(
                plan_rows(
                    targets,
                    blocks,
                    inside,
                    sizes,
                    offsets=offsets,
                    length=length,
                    chunk_size=chunk_size,
                    checksums=checksums,
                )
            )
            near.append(targets)
            far.append(np.uint64(self._base) + starts[blocks] + inside.astype(np.uint64))
        return Work(
            "sparse_read",
            plans,
            np.concatenate(near),
            np.concatenate(far),
            model.row_size,
            len(near[0]),
            model.row_size,
            len(near[0]),
            offsets.tolist(),
        )

    def _blocks(self, fragment: int, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the addresses of each block's fragments, and the blocks' offsets in the pool's
        data.
        """
        length = fragment * count
        room = -(-length // 4096) * 4096
        blocks = max(1, self.span // room)
        generator = np.random.default_rng(fragment + count)
        order = generator.permutation(blocks)
        first = np.arange(count)[None, :] * blocks + order[:, None]
        pages = np.uint64(self.memory.ctypes.data) + np.uint64(fragment) * first.astype(np.uint64)
        offsets = generator.permutation(blocks).astype(np.uint64) * np.uint64(room)
        return pages, offsets
