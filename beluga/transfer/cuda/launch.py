# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Launches kernels: describes a plan's bytes to the GPU, and gets the checksums that it computed.

Both lie in pinned memory, which the kernels access: a launch copies no tables in either direction.
Pinned buffers are reused, because an allocation would stop the GPU.

To compare a checksum, the whole chunk is read. The delivered bytes must be the summed bytes, even
if the pool's bytes change between two reads. So the chunks of a sparse plan are cut into runs that
are read once, with all their targets, even where rows overlap (:func:`runs_of`).

The tables of CRC-32C (``csrc/cuda/crc32c.cuh``) are polynomials over GF(2) modulo the Castagnoli
polynomial, reflected: x^0 is the highest of 32 bits.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib, record_dtype
from beluga.errors import TransferError
from beluga.transfer.cuda.driver import Driver, Grid, Pinned
from beluga.transfer.plan import CHUNK, LINE_SIZE, PIECE, STRIPE_SIZE, Plan, parts

Words = NDArray[np.uint32]

_POLYNOMIAL = np.uint32(0x82F63B78)
_WORD_SIZE = 16
_PART_SIZE = 4  # bytes of a part of a word; its checksum is its product with x^32


def multiply(a: Words | np.uint32, b: Words | np.uint32) -> Words:
    """Return the products of ``a`` and ``b``, which have one shape or are broadcast."""
    a, b = np.broadcast_arrays(np.asarray(a, np.uint32), np.asarray(b, np.uint32))
    product, b = np.zeros(a.shape, np.uint32), b.copy()
    for bit in range(31, -1, -1):
        product ^= b * ((a >> np.uint32(bit)) & np.uint32(1))
        b = (b >> np.uint32(1)) ^ (_POLYNOMIAL * (b & np.uint32(1)))
    return product


def powers(counts: NDArray[np.int64]) -> Words:
    """Return x^(8n) for each n of ``counts``, numbers of bytes below 2^32."""
    counts = np.asarray(counts, np.int64)
    found = np.full(counts.shape, 0x80000000, np.uint32)
    square = np.array(1 << 23, np.uint32)  # x^8
    while counts.any():
        found = np.where(counts & 1, multiply(found, square), found)
        square, counts = multiply(square, square), counts >> 1
    return found


@functools.cache
def tables(lanes: int) -> Words:
    """Return the tables for groups of ``lanes`` lanes: uint32 of shape (words,)."""
    byte = np.arange(256, dtype=np.uint32)
    placed = np.stack([byte << np.uint32(8 * k) for k in range(4)])
    factors = powers(np.array([lanes * _WORD_SIZE, _PART_SIZE]))
    words = powers(np.arange(32) * _WORD_SIZE + _PART_SIZE)
    by_bit = powers(1 << np.arange(32, dtype=np.int64))
    products = multiply(placed, factors[:, None, None])
    return np.concatenate([table.reshape(-1) for table in (products, words, by_bit)])


_SMALLEST = 64 << 10


def _class_of(size: int) -> int:
    return max(_SMALLEST, 1 << (size - 1).bit_length())


class Buffers:
    """Pinned memory, for use by one thread. Sizes are powers of two."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: dict[int, list[Pinned]] = {}  # by size
        self.sizes: dict[int, int] = {}  # of buffers in use, by address
        self._taken: list[Pinned] = []  # since begin()
        self.closed = False

    def begin(self) -> None:
        """Record the buffers that are taken from now on, for :meth:`undo`."""
        self._taken = []

    def undo(self) -> None:
        """Release all buffers that were taken since :meth:`begin`; they are unused now."""
        for pinned in self._taken:
            if pinned.address in self.sizes:
                self.give(pinned)

    def take(self, size: int) -> Pinned:
        """Take a buffer of at least ``size`` bytes."""
        size = _class_of(size)
        free = self._free.get(size)
        pinned = free.pop() if free else self._driver.pin(size)
        self.sizes[pinned.address] = size
        self._taken.append(pinned)
        return pinned

    def give(self, pinned: Pinned) -> None:
        """Release an unused buffer."""
        self._free.setdefault(self.sizes.pop(pinned.address), []).append(pinned)

    def close(self) -> None:
        """Free all released buffers."""
        for buffers in self._free.values():
            for pinned in buffers:
                self._driver.unpin(pinned)
        self._free.clear()
        self.closed = True


_STRIPE_SHIFT = STRIPE_SIZE.bit_length() - 1
_CHUNK_SHIFT = 33  # above the bits of a byte's offset in its chunk, which is below 2^32


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a sparse plan's chunks.

    ``pieces``, of type PIECE, are in order of runs. The pieces of a run differ only in their
    addresses; a piece without an address covers bytes that no row requests. ``extra``, of shape
    (pieces,), is -1, or for the first piece of a run the number of further pieces in the run.
    """

    pieces: NDArray[np.void]
    extra: NDArray[np.int64]


def runs_of(plan: Plan) -> Runs:
    """Cut the chunks of a sparse plan where rows and stripes begin and end.

    A row that overlaps others adds at most two runs, and has a piece in each of its runs.
    """
    chunk = (plan.pieces["chunk"] - plan.chunk_base).astype(np.int64)
    origin = plan.chunks["offset"].astype(np.int64)
    lengths = plan.chunks["length"].astype(np.int64)
    start = plan.pieces["offset"].astype(np.int64) - origin[chunk]
    first, last = (chunk << _CHUNK_SHIFT) + start, (chunk << _CHUNK_SHIFT) + start
    last += plan.pieces["length"]
    bottom = np.arange(len(origin)) << _CHUNK_SHIFT
    edges = np.unique(
        np.concatenate([first, last, bottom, bottom + lengths, _stripe_edges(origin, lengths)])
    )
    of_edge = edges >> _CHUNK_SHIFT
    is_run = np.append(of_edge[1:] == of_edge[:-1], False)  # otherwise a chunk ends there
    until = np.append(edges[1:], 0)
    # The pairs of a run and a row that contains it, in order of runs.
    begin, end = np.searchsorted(edges, first), np.searchsorted(edges, last)
    row, step = parts(end - begin)
    run = begin[row] + step
    unwanted = np.flatnonzero(is_run & (np.bincount(run, minlength=len(edges)) == 0))
    address = plan.pieces["address"][row] + (edges[run] - first[row]).astype(np.uint64)
    run = np.concatenate([run, unwanted])
    address = np.concatenate([address, np.zeros(len(unwanted), np.uint64)])
    order = np.argsort(run, kind="stable")
    run = run[order]
    pieces = np.empty(len(run), PIECE)
    pieces["address"] = address[order]
    pieces["offset"] = origin[of_edge[run]] + (edges[run] - bottom[of_edge[run]])
    pieces["length"] = until[run] - edges[run]
    pieces["chunk"] = of_edge[run] + plan.chunk_base
    leads = np.append(True, run[1:] != run[:-1])
    extra = np.full(len(run), -1)
    extra[leads] = np.diff(np.append(np.flatnonzero(leads), len(run))) - 1
    return Runs(pieces, extra)


def _stripe_edges(origin: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where stripes end within chunks."""
    stripe = origin >> _STRIPE_SHIFT
    chunk, step = parts(((origin + lengths - 1) >> _STRIPE_SHIFT) - stripe)
    place: NDArray[np.int64] = ((stripe[chunk] + 1 + step) << _STRIPE_SHIFT) - origin[chunk]
    return place + (chunk << _CHUNK_SHIFT)


RUN = np.dtype([("offset", "<u8"), ("place", "<u8"), ("size", "<u8")])


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A ``plan`` for a buffer of ``size`` bytes in place of the pool.

    ``runs``, of type RUN, maps bytes of the pool to bytes of the buffer, in whole lines.
    """

    plan: Plan
    runs: NDArray[np.void]
    size: int


def select(plan: Plan, mask: NDArray[np.bool_]) -> Plan:
    """Return the chunks of ``plan`` for which ``mask`` is True, with a copy of their checksums."""
    chunk = plan.pieces["chunk"] - plan.chunk_base
    number = np.cumsum(mask) - 1
    pieces = plan.pieces[mask[chunk]].copy()
    pieces["chunk"] = number[chunk[mask[chunk]]]
    chunks = plan.chunks[mask].copy()
    chunks["first"] = np.searchsorted(pieces["chunk"], np.arange(len(chunks)))
    return dataclasses.replace(
        plan,
        pieces=pieces,
        chunks=chunks,
        checksums=None if plan.checksums is None else plan.checksums[mask],
        piece_base=0,
        chunk_base=0,
    )


def pack_chunks(plan: Plan) -> Packed:
    """Concatenate the chunks, or the lines of the rows of a sparse plan without checksums."""
    if plan.sparse and plan.checksums is None:
        plan = _by_rows(plan)
    sizes = (plan.chunks["length"].astype(np.int64) + LINE_SIZE - 1) & -LINE_SIZE
    places = np.cumsum(sizes) - sizes
    pieces, chunks = plan.pieces.copy(), plan.chunks.copy()
    number = pieces["chunk"] - plan.chunk_base
    moved = places.astype(np.uint64) - plan.chunks["offset"]  # may wrap; the next line wraps back
    pieces["offset"] += moved[number]
    chunks["offset"] = places
    runs = np.zeros(len(chunks), RUN)
    runs["offset"], runs["place"], runs["size"] = plan.chunks["offset"], places, sizes
    packed = dataclasses.replace(plan, pieces=pieces, chunks=chunks)
    return Packed(packed, _join(runs), int(sizes.sum()))


def _by_rows(plan: Plan) -> Plan:
    """Return a plan in which the lines of each row are a chunk."""
    pieces = plan.pieces.copy()
    pieces["chunk"] = np.arange(len(pieces))
    chunks = np.zeros(len(pieces), CHUNK)
    chunks["offset"] = pieces["offset"] & np.uint64(~(LINE_SIZE - 1) & (1 << 64) - 1)
    chunks["length"] = pieces["offset"] + pieces["length"] - chunks["offset"]
    chunks["first"] = pieces["chunk"]
    return dataclasses.replace(plan, pieces=pieces, chunks=chunks, piece_base=0, chunk_base=0)


def _join(runs: NDArray[np.void]) -> NDArray[np.void]:
    """Merge runs that are adjacent both in the pool and in the buffer."""
    ends = runs["offset"] + runs["size"]
    starts = np.flatnonzero(np.concatenate([[True], runs["offset"][1:] != ends[:-1]]))
    joined: NDArray[np.void] = runs[starts].copy()
    joined["size"] = np.add.reduceat(runs["size"], starts)
    return joined


THREADS = 512  # threads of a block; 8 words of 16 bytes each are in flight: 64 KiB
HALF_BELOW = 2048  # half a warp copies spans of plans whose pieces are shorter, in bytes
SPAN = record_dtype("bl_span")
JOB = np.dtype([("spans", "<u8"), ("sums", "<u8"), ("tables", "<u8"), ("count", "<u8")])


class Launch:
    """The spans of a plan, and room for a checksum of each, in pinned memory.

    ``users`` counts the ranges that were launched and not yet finished, and the launch's maker.
    """

    def __init__(self, plan: Plan, write: bool, pinned: Pinned, count: int, room: int) -> None:
        self.plan, self.write, self.pinned, self._room = plan, write, pinned, room
        self.spans: NDArray[np.void] = pinned.array[: count * SPAN.itemsize].view(SPAN)
        self.sums = pinned.array[room : room + count * 4].view(np.uint32)
        self.lanes = 16 if plan.size < HALF_BELOW * len(plan.pieces) else 32
        self.users = 1

    def job(self, first: int, end: int, tables: int) -> NDArray[np.void]:
        """Return the kernel's argument for the spans from ``first`` to ``end``: a JOB, shape ()."""
        address = self.pinned.address
        spans, sums = address + first * SPAN.itemsize, address + self._room + first * 4
        return np.array((spans, sums, tables, end - first), JOB)

    @property
    def kernel(self) -> str:
        """The name of the kernel."""
        half, summed = self.lanes == 16, self.plan.checksums is not None
        verb = "gather" if self.write else "scatter"
        return f"bl_{verb}{'_half' if half else ''}{'_sum' if summed else ''}"

    def range(self, part: Plan) -> tuple[int, int]:
        """Return the first span of a part of the plan, and the span after its last one."""
        first = part.chunk_base
        if len(part.chunks) == len(self.plan.chunks):
            return 0, len(self.spans)
        found = np.searchsorted(self.spans["chunk"], [first, first + len(part.chunks)])
        return int(found[0]), int(found[1])

    def finish(self, part: Plan, first: int, end: int) -> int:
        """Store the checksums that the GPU computed in a part of the plan, whose spans are those
        from ``first`` to ``end``, or compare them. Return how many chunks of a read differ.
        """
        if part.checksums is None:
            return 0
        bad_count: int = lib.bl_spans_sum(
            ffi.from_buffer("bl_span[]", self.spans[first:end]),
            ffi.from_buffer("uint32_t[]", self.sums[first:end]),
            *(end - first, part.struct(), self.write),
        )
        return bad_count


class Launcher:
    """Launches kernels on at most ``blocks`` whole multiprocessors, or twice as many for checksums.

    Four multiprocessors of an H200 saturate its link. With checksums, eight write 0.90 and read
    0.80 of what a copy engine does, sixteen 0.92 and 0.89 (``bench/results/gpu-h200.json``).
    """

    def __init__(self, driver: Driver, buffers: Buffers, *, blocks: int) -> None:
        self.driver, self.buffers = driver, buffers
        self._blocks = blocks
        self.count = 0
        self._tables = {lanes: self._upload(tables(lanes)) for lanes in (16, 32)}

    def make(self, plan: Plan, windows: core.bl_windows, *, write: bool) -> Launch:
        """Describe a valid plan to the GPU; the caller releases the launch.

        ``windows`` is a ``bl_windows *``. Raises :class:`~beluga.errors.TransferError` if a window
        of the plan has no GPU address.
        """
        described, shared = plan, None
        if plan.sparse and plan.checksums is not None:
            runs = runs_of(plan)
            described = dataclasses.replace(plan, pieces=runs.pieces)
            shared = ffi.from_buffer("int64_t[]", runs.extra)
        most = len(described.pieces) + described.size // lib.BL_SPAN_SIZE
        room = most * SPAN.itemsize
        pinned = self.buffers.take(room + most * 4)
        count = lib.bl_spans_make(
            *(windows, described.struct(), shared or ffi.NULL, write),
            ffi.from_buffer("bl_span[]", pinned.array[:room], require_writable=True),
        )
        if count < 0:
            self.buffers.give(pinned)
            raise TransferError("a window of the plan is not registered; call settle() before")
        return Launch(plan, write, pinned, count, room)

    def run(self, launch: Launch, first: int, end: int, *, stream: int) -> None:
        """Launch the kernel for the spans from ``first`` to ``end``."""
        job = launch.job(first, end, self._tables[launch.lanes])
        blocks = self._blocks if launch.plan.checksums is None else 2 * self._blocks
        self.driver.launch(launch.kernel, Grid(blocks, THREADS), job, stream)
        self.count += 1

    def release(self, launch: Launch) -> None:
        """End one use of a launch; the last one frees its buffer."""
        launch.users -= 1
        if launch.users == 0:
            self.buffers.give(launch.pinned)

    def close(self) -> None:
        """Free the tables. No kernel is running."""
        for address in self._tables.values():
            self.driver.free(address)

    def _upload(self, words: NDArray[np.uint32]) -> int:
        """Upload words synchronously. Return the GPU address."""
        pinned, device = self.buffers.take(words.nbytes), self.driver.allocate(words.nbytes)
        pinned.array[: words.nbytes] = words.view(np.uint8)
        stream, event = self.driver.make_stream(urgent=True), self.driver.make_event()
        self.driver.copy(device, pinned.array.ctypes.data, words.nbytes, stream)
        self.driver.record(event, stream)
        self.driver.wait(event)
        self.driver.free_event(event)
        self.driver.end_stream(stream)
        self.buffers.give(pinned)
        return device
