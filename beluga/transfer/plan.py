# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Plans: which bytes of an engine's memory are which bytes of the pool (``csrc/api/transfer.h``).

A plan is made once for a layout and a list of blocks, by array operations, for any engine. Pieces
are cut where fragments, chunks and stripes end, so a piece is one run of bytes on both sides and
belongs to one checksum.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from beluga._ffi import core, ffi, lib, record_dtype
from beluga.errors import LayoutError

STRIPE_SIZE = 2 << 20


def whole_numbers(values: ArrayLike, what: str) -> NDArray[np.int64]:
    """Return ``values`` as int64.

    A mask or fractions would be misinterpreted, so they raise :class:`~beluga.errors.LayoutError`,
    with ``what`` as the values' name.
    """
    try:
        found = np.asarray(values)
    except ValueError:
        raise LayoutError(f"{what} must be a list of whole numbers, not a list of lists") from None
    if found.dtype.kind not in "iu" and found.size:
        raise LayoutError(f"{what} must be whole numbers, not an array of {found.dtype}")
    return found.astype(np.int64, copy=False)


def parts(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Enumerate parts, of which element i of a list has ``counts[i]``.

    Return two arrays of shape (parts,): the element of each part, and its number in that element.
    """
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


LINE_SIZE = 64
_LENGTH_MAX = 2**32 - 1  # bytes of a piece or a chunk, a uint32 in C
_POOL_SIZE_MAX = 1 << 62  # no sum exceeds 64 bits; a CPU addresses 2**57 bytes

PIECE = record_dtype("bl_piece")
CHUNK = record_dtype("bl_chunk")
ROW = record_dtype("bl_row")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A list of copies between an engine's memory and the pool.

    ``pieces``, of type :data:`PIECE` and shape (pieces,), are in order of their chunks. ``chunks``
    has type :data:`CHUNK` and shape (chunks,). ``checksums`` has a CRC-32C for each chunk (uint32),
    which a write fills in and a read compares; None: no checksums. The pieces of a ``sparse`` plan
    do not tile their chunks, so it can only be read, and the whole chunk is fetched to compare its
    checksum. ``owners`` keep the memory alive. Some memory of a ``read_only`` plan must not be
    written, so the plan can only write to the pool.
    """

    pieces: NDArray[np.void]
    chunks: NDArray[np.void]
    checksums: NDArray[np.uint32] | None = None
    sparse: bool = False
    owners: tuple[object, ...] = ()
    piece_base: int = 0
    chunk_base: int = 0
    read_only: bool = False
    _struct: tuple[core.bl_plan, tuple[core.CData, ...]] | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    _size: int = dataclasses.field(default=-1, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """The number of bytes to copy."""
        if self._size < 0:
            object.__setattr__(self, "_size", int(self.pieces["length"].sum()))
        return self._size

    def struct(self) -> core.bl_plan:
        """Return the ``bl_plan *`` for C, which is valid while this plan lives.

        The struct is made once: converting the arrays again, after a copy has evicted them from the
        CPU cache, costs a tenth of copying a block. The plan holds the buffers of its arrays, so
        that no array can be resized meanwhile. Raises :class:`~beluga.errors.LayoutError` for
        arrays with a wrong type or shape.
        """
        made = self._struct
        if made is None:
            made = self._made_struct()
            object.__setattr__(self, "_struct", made)
        return made[0]

    def _made_struct(self) -> tuple[core.bl_plan, tuple[core.CData, ...]]:
        """Make the struct for C. Return it with the buffers that it points to."""
        for array, kind in ((self.pieces, PIECE), (self.chunks, CHUNK)):
            if array.dtype != kind or array.ndim != 1 or not array.flags.c_contiguous:
                raise LayoutError("a plan's pieces and chunks are contiguous arrays of their types")
        if not self.pieces["length"].all():  # C would treat it as the end of the list
            raise LayoutError("a plan has a piece without bytes")
        sums = self.checksums
        if sums is not None and (
            sums.dtype != np.uint32
            or sums.shape != self.chunks.shape
            or not sums.flags.c_contiguous
            or not sums.flags.writeable
        ):
            raise LayoutError("a plan has a checksum, a uint32, for each of its chunks")
        pieces = ffi.from_buffer("bl_piece[]", self.pieces)
        chunks = ffi.from_buffer("bl_chunk[]", self.chunks)
        checksums = ffi.NULL if sums is None else ffi.from_buffer("uint32_t[]", sums)
        struct = ffi.new(
            "bl_plan *",
            {
                "pieces": pieces,
                "chunks": chunks,
                "checksums": checksums,
                "piece_count": len(self.pieces),
                "chunk_count": len(self.chunks),
                "piece_base": self.piece_base,
                "chunk_base": self.chunk_base,
                "sparse": self.sparse,
            },
        )
        return struct, (pieces, chunks, checksums)

    def refuse_direction(self, *, write: bool) -> None:
        """Raise :class:`~beluga.errors.LayoutError` if the plan cannot go in this direction."""
        if write and self.sparse:
            raise LayoutError("a sparse plan can only be read")
        if not write and self.read_only:
            raise LayoutError("this plan's memory is read-only: it can only be written from")

    def refuse_beyond(self, pool_size: int) -> None:
        """Raise :class:`~beluga.errors.LayoutError` if a byte lies beyond the pool's end.

        ``pool_size`` is the pool's linear range (``Geometry.size``), in bytes.
        """
        if lib.bl_plan_within(self.struct(), pool_size):
            return
        for what, rows in (("piece", self.pieces), ("chunk", self.chunks)):
            ends = rows["offset"] + rows["length"]
            wrong = (ends > pool_size) | (ends < rows["offset"])
            if wrong.any():
                row = rows[int(np.argmax(wrong))]
                raise LayoutError(
                    f"a {what} of {row['length']} bytes at pool offset {row['offset']} needs "
                    f"{int(row['offset']) + int(row['length'])} bytes; the pool has {pool_size}"
                )


def plan_blocks(  # noqa: PLR0913  all but the first three named
    addresses: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    offsets: ArrayLike,
    *,
    chunk_size: int = 0,
    owners: tuple[object, ...] = (),
    read_only: bool = False,
) -> Plan:
    """Plan whole blocks whose fragments have equal sizes.

    ``addresses`` has shape (blocks, fragments). ``sizes`` has shape (fragments,), in bytes;
    concatenated, the fragments are a block's payload. ``offsets``, of shape (blocks,), has the
    blocks' places in the pool, multiples of a line. With a ``chunk_size``, in bytes and a multiple
    of a line, each chunk of the payload has a checksum. Raises :class:`~beluga.errors.LayoutError`
    for anything else.
    """
    addresses = np.atleast_2d(np.asarray(addresses, np.uint64))
    sizes, offsets = np.asarray(sizes, np.int64), _pool_offsets(offsets)
    blocks, fragments = addresses.shape
    if sizes.shape != (fragments,) or offsets.shape != (blocks,):
        raise LayoutError(
            f"addresses of shape {addresses.shape} need {fragments} sizes and {blocks} offsets, "
            f"not {sizes.shape} and {offsets.shape}"
        )
    if blocks == 0 or fragments == 0 or (sizes <= 0).any():
        raise LayoutError("a plan needs blocks, and fragments that have bytes")
    if chunk_size % LINE_SIZE or chunk_size < 0 or (offsets % np.uint64(LINE_SIZE)).any():
        raise LayoutError(f"offsets and the chunk size are multiples of {LINE_SIZE} bytes")
    length = int(sizes.sum())
    chunk = chunk_size or length
    _refuse_long(min(chunk, length))
    per_block = -(-length // chunk)
    addresses, sizes = np.ascontiguousarray(addresses), np.ascontiguousarray(sizes)
    offsets = np.ascontiguousarray(offsets)
    stripes = (length - 1) // STRIPE_SIZE + 2  # the largest number of stripes of a block
    pieces = np.empty(blocks * (fragments + per_block + stripes), PIECE)
    chunks = np.empty(blocks * per_block, CHUNK)
    count = lib.bl_plan_blocks(
        ffi.from_buffer("uint64_t[]", addresses),
        ffi.from_buffer("uint64_t[]", sizes.view(np.uint64)),
        ffi.from_buffer("uint64_t[]", offsets),
        *(blocks, fragments, min(chunk, length)),
        ffi.from_buffer("bl_piece[]", pieces, require_writable=True),
        ffi.from_buffer("bl_chunk[]", chunks, require_writable=True),
    )
    pieces = pieces[:count]
    checksums = np.zeros(len(chunks), np.uint32) if chunk_size else None
    return Plan(pieces, chunks, checksums, owners=owners, read_only=read_only)


def plan_rows(  # noqa: PLR0913  all but the first four named
    addresses: NDArray[np.uint64],
    blocks: NDArray[np.int64],
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
    *,
    offsets: ArrayLike,
    length: int,
    chunk_size: int = 0,
    checksums: NDArray[np.uint32] | None = None,
    owners: tuple[object, ...] = (),
    read_only: bool = False,
) -> Plan:
    """Plan the reading of some bytes of some blocks.

    The first four arguments are arrays of shape (rows,). Row i takes ``sizes[i]`` bytes at byte
    ``places[i]`` of the payload of block ``blocks[i]`` to ``addresses[i]``. ``offsets``, of shape
    (blocks,), has the blocks' places in the pool. ``length`` is the size of a block's payload in
    bytes. ``checksums``, of shape (blocks, chunks), has a CRC-32C for each ``chunk_size`` bytes;
    the checksums of the chunks that a row intersects are compared. None: no comparison. Raises
    :class:`~beluga.errors.LayoutError` for anything else.
    """
    addresses, offsets = np.asarray(addresses, np.uint64), _pool_offsets(offsets)
    blocks, places = np.asarray(blocks, np.int64), np.asarray(places, np.int64)
    sizes = np.asarray(sizes, np.int64)
    chunk = chunk_size if checksums is not None else length
    rows = (addresses, blocks, places, sizes)
    shapes = sorted({array.shape for array in rows})
    if len(shapes) != 1 or addresses.ndim != 1 or offsets.ndim != 1:
        raise LayoutError(f"rows need four arrays of one length, not of shapes {shapes}")
    if len(addresses) == 0 or (sizes <= 0).any():
        raise LayoutError("a plan needs rows that have bytes")
    if (offsets % np.uint64(LINE_SIZE)).any() or chunk <= 0 or (chunk != length and chunk % 64):
        raise LayoutError(f"offsets and the chunk size are multiples of {LINE_SIZE} bytes")
    if blocks.min() < 0 or blocks.max() >= len(offsets):
        raise LayoutError(f"rows need blocks {blocks.min()} to {blocks.max()} of {len(offsets)}")
    if places.min() < 0 or (places + sizes).max() > length:
        raise LayoutError(f"a row needs {(places + sizes).max()} bytes; a block has {length}")
    _refuse_long(min(chunk, length))
    per_block = -(-length // chunk)
    if checksums is not None and checksums.shape != (len(offsets), per_block):
        raise LayoutError(
            f"checksums need shape {(len(offsets), per_block)}, not {checksums.shape}"
        )
    given = (
        ffi.from_buffer("bl_row[]", pack_rows(addresses, blocks, places, sizes)),
        len(addresses),
        ffi.from_buffer("uint64_t[]", np.ascontiguousarray(offsets)),
    )
    room = lib.bl_plan_rows_count(*given, chunk)
    pieces, chunks = np.empty(room, PIECE), np.empty(room, CHUNK)
    checked, sums = checksums is not None, np.empty(room, np.uint32)
    all_sums = np.ascontiguousarray(checksums if checked else sums, np.uint32)
    count = lib.bl_plan_rows(
        *(*given, length, chunk),
        ffi.from_buffer("uint32_t[]", all_sums) if checked else ffi.NULL,
        ffi.from_buffer("bl_piece[]", pieces, require_writable=True),
        ffi.from_buffer("bl_chunk[]", chunks, require_writable=True),
        ffi.from_buffer("uint32_t[]", sums, require_writable=True),
    )
    if count < 0:
        raise MemoryError(f"planning {len(addresses)} rows")
    return Plan(
        pieces,
        chunks[:count],
        sums[:count] if checked else None,
        sparse=True,
        owners=owners,
        read_only=read_only,
    )


def pack_rows(
    addresses: NDArray[np.uint64],
    blocks: NDArray[np.int64],
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> NDArray[np.void]:
    """Return the rows of :func:`plan_rows` as an array of :data:`ROW`, of shape (rows,)."""
    rows = np.empty(len(addresses), ROW)
    rows["address"], rows["block"] = addresses, blocks
    rows["place"], rows["size"] = places, sizes
    return rows


def _pool_offsets(offsets: ArrayLike) -> NDArray[np.uint64]:
    found = whole_numbers(offsets, "offsets")
    if found.size and (found.min() < 0 or found.max() >= _POOL_SIZE_MAX):
        raise LayoutError(f"offsets {found.min()} to {found.max()} lie outside any pool")
    return found.view(np.uint64)


def _refuse_long(chunk: int) -> None:
    if chunk > _LENGTH_MAX:
        raise LayoutError(
            f"a chunk has {chunk} bytes, more than {_LENGTH_MAX}; use a smaller chunk size"
        )
