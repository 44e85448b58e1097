# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Plans: which bytes of an engine's memory are which bytes of the pool (``csrc/api_transfer.h``).

A plan is made once per layout and list of blocks, by array operations, and given to any engine.
Pieces are cut where fragments, chunks and stripes end: a piece lies in one run on both sides and
counts for one checksum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga.errors import LayoutError

LINE_SIZE = 64
STRIPE_SIZE = 2 << 20

PIECE = np.dtype([("address", "<u8"), ("offset", "<u8"), ("length", "<u4"), ("chunk", "<u4")])
CHUNK = np.dtype([("offset", "<u8"), ("length", "<u4"), ("first", "<u4")])


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """``pieces`` of type :data:`PIECE`, chunk by chunk, and ``chunks`` of type :data:`CHUNK`.

    ``checksums`` has a CRC-32C per chunk (uint32): filled in by a write, compared by a read; None
    where nothing is summed. ``sparse``: pieces do not tile their chunks, so it can only be read,
    and to compare a checksum the whole chunk is fetched. ``owners`` keep the memory alive.
    """

    pieces: NDArray[Any]
    chunks: NDArray[Any]
    checksums: NDArray[np.uint32] | None = None
    sparse: bool = False
    owners: tuple[Any, ...] = ()
    piece_base: int = 0
    chunk_base: int = 0

    @property
    def size(self) -> int:
        """Bytes that are moved."""
        return int(self.pieces["length"].sum())

    def cut(self, size: int) -> Iterator[Plan]:
        """The same in parts of at most ``size`` bytes of pieces, or one chunk if that has more.

        Parts share this plan's arrays: checksums that a part fills in are this plan's.
        """
        ends = (
            np.cumsum(np.add.reduceat(self.pieces["length"], self._firsts(), dtype=np.int64))
            if len(self.chunks)
            else np.empty(0, np.int64)
        )
        start, before = 0, 0
        while start < len(self.chunks):
            end = max(int(np.searchsorted(ends, before + size, side="right")), start + 1)
            yield self._part(start, end)
            start, before = end, int(ends[end - 1])

    def _firsts(self) -> NDArray[np.int64]:
        return self.chunks["first"].astype(np.int64) - self.piece_base

    def _part(self, start: int, end: int) -> Plan:
        firsts = self._firsts()
        first = int(firsts[start])
        last = int(firsts[end]) if end < len(firsts) else len(self.pieces)
        return dataclasses.replace(
            self,
            pieces=self.pieces[first:last],
            chunks=self.chunks[start:end],
            checksums=None if self.checksums is None else self.checksums[start:end],
            piece_base=self.piece_base + first,
            chunk_base=self.chunk_base + start,
        )


def plan_blocks(
    addresses: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    offsets: NDArray[np.uint64],
    *,
    chunk_size: int = 0,
    owners: tuple[Any, ...] = (),
) -> Plan:
    """A plan for whole blocks that are all fragmented alike.

    ``addresses`` has shape (blocks, fragments); ``sizes`` has shape (fragments,), in bytes: end to
    end they are a block's payload. ``offsets`` are the blocks' places in the pool, multiples of a
    line. With a ``chunk_size``, a multiple of a line, every so many bytes of payload have a
    checksum. Raises :class:`~beluga.errors.LayoutError` for anything else.
    """
    addresses = np.atleast_2d(np.asarray(addresses, np.uint64))
    sizes, offsets = np.asarray(sizes, np.int64), np.asarray(offsets, np.uint64)
    blocks, fragments = addresses.shape
    if sizes.shape != (fragments,) or offsets.shape != (blocks,):
        raise LayoutError(
            f"addresses of shape {addresses.shape} need {fragments} sizes and {blocks} offsets, "
            f"have {sizes.shape} and {offsets.shape}"
        )
    if blocks == 0 or fragments == 0 or (sizes <= 0).any():
        raise LayoutError("a plan needs blocks, and fragments that have bytes")
    if chunk_size % LINE_SIZE or chunk_size < 0 or (offsets % np.uint64(LINE_SIZE)).any():
        raise LayoutError(f"offsets and the chunk size are multiples of {LINE_SIZE} bytes")
    length = int(sizes.sum())
    chunk = chunk_size or length
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    cuts = _cuts(starts, np.arange(0, length, chunk), offsets, length)
    follows = np.concatenate([cuts[:, 1:], np.full((blocks, 1), length)], axis=1)
    block, column = np.nonzero(follows > cuts)
    at, end = cuts[block, column], follows[block, column]
    fragment = np.searchsorted(starts, at, side="right") - 1
    per_block = -(-length // chunk)
    pieces = np.empty(len(at), PIECE)
    pieces["address"] = addresses[block, fragment] + (at - starts[fragment]).astype(np.uint64)
    pieces["offset"] = offsets[block] + at.astype(np.uint64)
    pieces["length"] = end - at
    pieces["chunk"] = block * per_block + at // chunk
    places = np.arange(per_block) * chunk
    chunks = np.empty(blocks * per_block, CHUNK)
    chunks["offset"] = (offsets[:, None] + places.astype(np.uint64)).reshape(-1)
    chunks["length"] = np.tile(np.minimum(length - places, chunk), blocks)
    chunks["first"] = np.searchsorted(pieces["chunk"], np.arange(len(chunks)))
    checksums = np.zeros(len(chunks), np.uint32) if chunk_size else None
    return Plan(pieces, chunks, checksums, owners=owners)


def _cuts(
    starts: NDArray[np.int64],
    chunks: NDArray[np.int64],
    offsets: NDArray[np.uint64],
    length: int,
) -> NDArray[np.int64]:
    """Where pieces begin in each block's payload, in order; some twice, some at its end."""
    to_stripe = STRIPE_SIZE - (offsets % np.uint64(STRIPE_SIZE)).astype(np.int64)
    stripes = to_stripe[:, None] + np.arange(0, length, STRIPE_SIZE)[None, :]
    common = np.tile(np.concatenate([starts, chunks]), (len(offsets), 1))
    return np.sort(np.minimum(np.concatenate([common, stripes], axis=1), length), axis=1)
