# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts and gets through a copy engine: begin, plan, copy, end (``csrc/kvcache/batch.h``).

Space may be reused only when no transfer can still write to it (D15). So a put or get returns only
after all its transfers have ended. If that cannot be established, the session abandons its nonce,
and the server quarantines the space until this process has ended.

No interrupt can stop a batch between its grants and their end: those of the main thread run on the
cache's worker (``ring.py``).
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import core, ffi, lib
from beluga.errors import (
    ChecksumError,
    DeviceFaultError,
    NoRoomError,
    TransferCancelledError,
    UnsettledError,
)
from beluga.index import BlockState
from beluga.transfer import Plan, plan_blocks, settle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.kvcache.buffers import Run
    from beluga.kvcache.ring import OpTicket
    from beluga.transfer import CopyEngine, Transfer

    Part = tuple[NDArray[np.int64], Plan]  # blocks of a batch, and their copy plan


_GROUP_SIZE = 64 << 20  # bytes; copying this much takes longer than planning the next group


class EngineBatch:
    """One batch of a session and its copy engine. Nothing of a cancelled one is published, because
    its memory may already be reused.
    """

    def __init__(
        self,
        engine: CopyEngine,
        session: core.bl_session,
        batch: core.bl_kv_batch,
        pool_size: int,
        ticket: OpTicket[int],
    ) -> None:
        self._engine, self._session, self._batch = engine, session, batch
        self._pool_size, self._ticket = pool_size, ticket
        count, chunk_size = batch.count, batch.chunk_size
        chunks = -(-batch.length // chunk_size) if chunk_size else 0
        self.offsets = np.zeros(count, np.uint64)
        self.checksums = np.zeros((count, chunks), np.uint32)
        self._pending = ffi.new("bl_kv_pending **")

    def put(self, run: Run, states: NDArray[np.uint8], statuses: NDArray[np.int32]) -> int:
        """Store blocks, with the results of ``bl_kv_put``.

        If the engine raises an error, nothing is stored and the error is raised.
        """
        outputs = (
            ffi.from_buffer("uint8_t[]", states, require_writable=True),
            ffi.from_buffer("int32_t[]", statuses, require_writable=True),
        )
        # Allocated first, because the end must not fail for lack of memory
        checksums = self._checksums()
        written = -errno.ECANCELED
        code = lib.bl_kv_put_begin(
            self._session, self._batch, *outputs, self._offsets(), self._pending
        )
        if code < 0:
            return int(code)
        try:
            granted = np.flatnonzero(states == BlockState.GRANTED)
            parts = self._parts(run, granted) if len(granted) else ()
            _move(self._engine.gather_write, parts, self._keep_checksums)
            if self._ticket.cancelled:
                raise TransferCancelledError("storing blocks: it was interrupted")
            written = 0
        except DeviceFaultError:
            written = -lib.BL_ERROR_DEVICE_FAULT  # reports the failed memory to the server
            raise
        except NoRoomError:
            written = -lib.BL_ERROR_NO_ROOM  # the blocks are refused
        except UnsettledError:
            written = -errno.EINPROGRESS  # the grants remain
            raise
        finally:
            code = lib.bl_kv_put_end(self._pending[0], checksums, written, *outputs)
        return int(code)

    def get(
        self,
        states: NDArray[np.uint8],
        mismatches: core.uint64_p,
        parts_of: Callable[[NDArray[np.int64]], Iterable[Part]],
    ) -> int:
        """Fetch blocks, with the results of ``bl_kv_get``.

        ``parts_of`` plans the readable blocks of the batch and their checksums. Blocks with a wrong
        checksum are misses.
        """
        outputs = ffi.from_buffer("uint8_t[]", states, require_writable=True)
        out = self._offsets(), self._checksums(), self._pending
        code = lib.bl_kv_get_begin(self._session, self._batch, outputs, *out)
        if code < 0:
            return int(code)
        copied = -errno.ECANCELED
        try:
            hits = np.flatnonzero(states[:code] == BlockState.HIT)
            for blocks in self._read(hits, parts_of):
                # The second attempt counts them and sets their state
                states[blocks] = BlockState.REFUSED
            copied = 0
        except DeviceFaultError:
            copied = -lib.BL_ERROR_DEVICE_FAULT
            raise
        finally:
            code = lib.bl_kv_get_end(self._pending[0], copied, outputs, mismatches)
        return int(code)

    def _read(
        self,
        hits: NDArray[np.int64],
        parts_of: Callable[[NDArray[np.int64]], Iterable[Part]],
    ) -> list[int]:
        """Read the blocks and return those with a wrong checksum.

        If the checksum of a part is wrong, each of its blocks is read again by itself.
        """
        if len(hits) == 0:
            return []
        try:
            _move(self._engine.scatter_read, parts_of(hits), lambda _: None)
        except ChecksumError:
            if len(hits) == 1:
                return [int(hits[0])]
            return [block for hit in hits for block in self._read(np.array([hit]), parts_of)]
        return []

    def _keep_checksums(self, part: Part) -> None:
        blocks, plan = part
        if plan.checksums is not None:
            self.checksums[blocks] = plan.checksums.reshape(len(blocks), -1)

    def blocks(self, run: Run) -> Callable[[NDArray[np.int64]], Iterable[Part]]:
        """Return a function that plans reads of whole blocks of a run."""
        summed = bool(self._batch.check_checksums) and self.checksums.shape[1] > 0

        def parts_of(hits: NDArray[np.int64]) -> Iterable[Part]:
            for blocks, plan in self._parts(run, hits, summed=summed):
                if plan.checksums is not None:
                    plan.checksums[:] = self.checksums[blocks].reshape(-1)
                yield blocks, plan

        return parts_of

    def _parts(self, run: Run, blocks: NDArray[np.int64], *, summed: bool = True) -> Iterable[Part]:
        """Plan blocks in groups of about :data:`_GROUP_SIZE` bytes, so that the engine copies one
        group while the next one is planned.
        """
        fragments = run.fragments.reshape(run.count, run.fragment_count, 2)
        most = max(_GROUP_SIZE // run.length, 1)
        # A small first group, because the engine idles until it is planned
        first, count = 0, max(most // 8, 1)
        while first < len(blocks):
            group = blocks[first : first + count]
            first, count = first + len(group), min(2 * count, most)
            for alike in _alike(fragments[group, :, 1], group):
                shape = fragments[alike[0], :, 1]
                filled = shape > 0
                addresses = fragments[alike, :, 0]
                plan = plan_blocks(
                    addresses if filled.all() else addresses[:, filled],
                    shape[filled].astype(np.int64),
                    self.offsets[alike],
                    chunk_size=int(self._batch.chunk_size) if summed else 0,
                    owners=tuple(run.owners),
                )
                plan.refuse_beyond(self._pool_size)
                yield alike, plan

    def _offsets(self) -> core.uint64_p:
        return ffi.from_buffer("uint64_t[]", self.offsets, require_writable=True)

    def _checksums(self) -> core.uint32_p:
        return ffi.from_buffer("uint32_t[]", self.checksums, require_writable=True)


def _alike(sizes: NDArray[np.uint64], blocks: NDArray[np.int64]) -> Iterable[NDArray[np.int64]]:
    """Group blocks by their fragment sizes, which have shape (blocks, fragments)."""
    if (sizes == sizes[0]).all():
        return [blocks]
    shapes, which = np.unique(sizes, axis=0, return_inverse=True)
    return [blocks[which.reshape(-1) == index] for index in range(len(shapes))]


def _move(
    start: Callable[[Plan], Transfer], parts: Iterable[Part], ended: Callable[[Part], None]
) -> None:
    """Start each plan as soon as it is made, and wait for them in order. Call ``ended`` with each
    finished part while the engine copies later ones.

    No transfer is still running on return or on an error, except after
    :class:`~beluga.errors.UnsettledError`.
    """
    under_way: deque[tuple[Part, Transfer]] = deque()
    try:
        for part in parts:
            under_way.append((part, start(part[1])))
        while under_way:
            part, transfer = under_way[0]
            transfer.wait()
            ended(part)
            del under_way[0]
    finally:
        settle(transfer for _, transfer in under_way)
