# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A tier on one disk: blocks in one file of bounded size.

A block's bytes are written first, then its entry in the index, then both are made durable; only
then the block counts as saved. Whatever dies in between, a block is whole or a miss: the entry and
the bytes have checksums of their own.

What touches the disk runs in a thread that its caller may leave (calls.py). What answers from the
index in memory does not, and never waits for a disk.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga._shared import when_forked
from beluga.errors import TierError
from beluga.metrics import REGISTRY
from beluga.tiers.arena import Arena
from beluga.tiers.disk.calls import DiskCall, DiskThreads
from beluga.tiers.disk.engine import EngineMaker, Requests, make_engine
from beluga.tiers.disk.file import PAGE
from beluga.tiers.disk.health import DirectionHealth
from beluga.tiers.disk.owner import Owner
from beluga.tiers.disk.store import (
    GRANTED,
    PENDING,
    PRESENT,
    Keys,
    Places,
    Store,
    StoreSettings,
    requests_of,
)
from beluga.tiers.tier import BLOCK, StoredBlock

_SAVED_BLOCKS = REGISTRY.counter("beluga_tier_saved_blocks_total", "Blocks that a tier has stored.")
_SAVED_BYTES = REGISTRY.counter("beluga_tier_saved_bytes_total", "Bytes that a tier has stored.")
_LOADED_BLOCKS = REGISTRY.counter(
    "beluga_tier_loaded_blocks_total", "Blocks that a tier has returned."
)
_LOADED_BYTES = REGISTRY.counter(
    "beluga_tier_loaded_bytes_total", "Bytes that a tier has returned."
)
_MISSES = REGISTRY.counter("beluga_tier_missed_blocks_total", "Blocks that a tier did not find.")
_WRITTEN = REGISTRY.counter(
    "beluga_tier_written_bytes_total", "Bytes written to a tier's medium, with its index."
)
_DAMAGED = REGISTRY.counter(
    "beluga_tier_damaged_blocks_total", "Blocks that were dropped because their bytes were wrong."
)
_GAUGES = {
    "blocks": REGISTRY.gauge("beluga_tier_blocks", "Blocks that a tier has."),
    "used_bytes": REGISTRY.gauge("beluga_tier_used_bytes", "Space that a tier's blocks take."),
    "data_bytes": REGISTRY.gauge("beluga_tier_data_bytes", "Space that a tier has for blocks."),
    "evicted": REGISTRY.gauge("beluga_tier_evicted_blocks", "Blocks that a tier has evicted."),
}

_BREAKER = REGISTRY.gauge("beluga_tier_breaker_state", "0 is closed, 1 half-open, 2 open.")

_LEASE_BYTES = 8 << 20  # blocks of one load that share a buffer
_SAVE_BYTES = 32 << 20  # written before their entries are
_RETRY_FAILURES = 2  # of a load, after which its other blocks are given up
_SETTLE_S = 0.2  # how often a save looks again whether another one has ended
_CLOSE_S = 0.005  # how often the end looks again whether all calls have ended

_PAYLOAD_DIMENSIONS = 2


class DiskTier:
    """A tier in a folder, a raw file or a block device: see :class:`beluga.tiers.tier.LowerTier`.

    At most ``size`` bytes of the disk are used. ``server`` names whose blocks they are, and
    ``pool`` is the id of its pool: a path of another server and another pool is refused.
    ``eviction`` is the policy, ``smallest_block`` the size that the index is made for; ``io`` is
    "uring", "threads", "auto" or the maker of an engine, and ``depth`` its requests under way for
    each call.

    A disk hangs if an operation is not done within ``limit_s``, with a second more for each 4 MiB.
    Its caller then leaves, with misses, or blocks that are not saved. The memory and the space that
    the operation may still write are kept until it has ended.

    Raises TierError: the path is in use, damaged, foreign, or of another version or server; there
    is no room, or an argument makes no sense.
    """

    def __init__(  # noqa: PLR0913  all but the first two named
        self,
        path: str | os.PathLike[str],
        size: int,
        *,
        server: str = "",
        pool: str = "",
        eviction: str = "lru",
        smallest_block: int = 16 << 10,
        io: str | EngineMaker = "auto",
        depth: int = 32,
        limit_s: float = 10.0,
    ) -> None:
        self.name = f"disk:{os.fspath(path)}"
        maker = make_engine(io) if isinstance(io, str) else io
        self._settings = StoreSettings(
            Path(path), size, Owner(server, pool), eviction, smallest_block, depth, maker
        )
        self._arena = Arena()
        self._store: Store | None = Store(self._settings, self._arena)
        self._closed = False
        self._lock = threading.Lock()  # for the store and its users; no disk is waited for under it
        self._settled = threading.Condition()  # a save has ended; only threads of calls use it
        self._threads = DiskThreads(limit_s)
        self._lost: Callable[[Keys], None] = _nobody
        self._reopening = threading.Lock()
        self.loads = DirectionHealth(self.name, "load")
        self.saves = DirectionHealth(self.name, "save")
        when_forked(self)
        ref = weakref.ref(self)
        _BREAKER.set(partial(_breaker, ref), tier=self.name)
        for name, gauge in _GAUGES.items():
            gauge.set(partial(_gauge, ref, name), tier=self.name)

    # ---- The contract

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Save blocks, and return which of them are saved now, or were before."""
        return self.saving(records, payload).result()

    def load(self, keys: Keys) -> list[StoredBlock | None]:
        """Load blocks; a miss is None. :meth:`contains` says which of the missed ones the tier
        still has: the disk failed, hangs, or is left alone for a while.
        """
        return self.loading(keys).result()

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which blocks the tier has, whether or not they can be read now. It has a block
        until it is evicted or removed, or was read with wrong bytes. This asks no disk.
        """
        keys = _checked_keys(keys)
        with self._lock:
            return np.zeros(len(keys), np.bool_) if self._store is None else self._store.has(keys)

    def remove(self, keys: Keys) -> int:
        """Remove blocks, and return how many there were."""
        return self.removing(keys).result()[0]

    def forget(self, keys: Keys) -> NDArray[np.bool_]:
        """Remove blocks for good, and return which keys have none any more: all of them, or none if
        the disk fails. Then no load returns them, but a restart may find them.
        """
        return np.full(len(keys), self.removing(keys).result()[1])

    # ---- The same, for a caller who has several disks

    def saving(
        self,
        records: NDArray[np.void],
        payload: NDArray[np.uint8],
        rows: NDArray[np.intp] | None = None,
    ) -> DiskCall[NDArray[np.bool_]]:
        """Return a call that saves blocks, those of ``rows`` of the payload if it is given."""
        saved = np.zeros(len(records), np.bool_)
        if rows is None:
            records, payload = _checked(records, payload)

        def work(call: DiskCall[NDArray[np.bool_]]) -> NDArray[np.bool_]:
            mine = _checked(records, payload if rows is None else payload[rows])
            with self._working() as store:
                if store is None or not len(records):
                    return saved
                if not self.saves.allows():
                    return store.has(np.ascontiguousarray(mine[0]["key"]))
                self._save_all(call, store, *mine, saved)
                evicted = store.take_evicted()
            self._tell(call, evicted)
            return saved

        def hung() -> NDArray[np.bool_]:
            known: NDArray[np.bool_] = saved.copy()
            self.saves.failed(errno.ETIMEDOUT, int(np.count_nonzero(~known)))
            return known

        return DiskCall(self._threads, work, hung)

    def loading(self, keys: Keys) -> DiskCall[list[StoredBlock | None]]:
        """Return a call that loads blocks."""
        keys = _checked_keys(keys)

        def work(call: DiskCall[list[StoredBlock | None]]) -> list[StoredBlock | None]:
            blocks: list[StoredBlock | None] = [None] * len(keys)
            with self._working() as store:
                if store is None or not self.loads.allows():
                    _MISSES.add(len(keys), tier=self.name)
                    return blocks
                records, places = store.find(keys)
                try:
                    damaged = self._read(call, store, keys, records, places, blocks)
                finally:
                    store.unpin(places)
            self._tell(call, damaged)
            return blocks

        def hung() -> list[StoredBlock | None]:
            self.loads.failed(errno.ETIMEDOUT, len(keys))
            return [None] * len(keys)

        return DiskCall(self._threads, work, hung)

    def removing(self, keys: Keys) -> DiskCall[tuple[int, bool]]:
        """Return a call that removes blocks. Its result is how many there were, and whether they
        are gone for good.
        """
        keys = _checked_keys(keys)
        counts: list[int] = []

        def work(call: DiskCall[tuple[int, bool]]) -> tuple[int, bool]:
            with self._working() as store:
                if store is None:
                    return 0, False
                counts.append(store.remove(keys))
                return counts[0], self._flush(call, store, durable=True)

        def hung() -> tuple[int, bool]:
            self.saves.failed(errno.ETIMEDOUT)
            return sum(counts), False

        return DiskCall(self._threads, work, hung)

    @property
    def block_count_max(self) -> int:
        """The most blocks that the tier can have."""
        return self.stat().get("slots", 0)

    def keys(self) -> Keys:
        """Return the keys of all blocks that the tier has, shape (count, 2)."""
        with self._lock:
            return np.zeros((0, 2), np.uint64) if self._store is None else self._store.keys()

    @property
    def data_offset(self) -> int:
        """Where in the file the blocks begin."""
        with self._lock:
            return 0 if self._store is None else self._store.file.layout.data_offset

    def on_lost(self, lost: Callable[[Keys], None]) -> None:
        """Have ``lost(keys)`` called with blocks that were evicted, or that turned out to be
        damaged.
        """
        self._lost = lost

    def _tell(self, call: DiskCall[Any], lost: Keys) -> None:
        call.rest()
        if len(lost):
            self._lost(lost)

    def close(self) -> None:
        """Finish what is under way, and close the file. A second call does nothing. If the disk
        hangs, the file stays open and locked until it goes on.
        """
        if self._closed and self._store is None:
            return
        self._closed = True
        for gauge in (_BREAKER, *_GAUGES.values()):
            gauge.remove(tier=self.name)
        DiskCall(self._threads, self._end, _nothing, always=True).result()

    def _end(self, call: DiskCall[None]) -> None:
        with self._lock:
            store, self._store = self._store, None
            used = store is not None and store.users > 0
        if store is None:
            return
        if not used:
            store.close()
        while used and not call.left:  # whoever leaves the store last closes it
            time.sleep(_CLOSE_S)
            with self._lock:
                used = not store.closed

    def stat(self) -> dict[str, int]:
        """Return counts: blocks, used_bytes, data_bytes, slots, evicted, damaged, dirty."""
        with self._lock:
            return {} if self._store is None else self._store.stat()

    # ---- Saves

    def _save_all(
        self,
        call: DiskCall[NDArray[np.bool_]],
        store: Store,
        records: NDArray[np.void],
        payload: NDArray[np.uint8],
        saved: NDArray[np.bool_],
    ) -> None:
        """Save blocks, and wait for those that other threads are saving, but not for a disk that
        hangs with them.
        """
        left = np.arange(len(records))
        until = time.monotonic() + self._threads.limit_s
        while len(left):
            call.step()
            places = store.reserve(records[left])
            granted = np.flatnonzero(places["state"] == GRANTED)
            self._write(call, store, places[granted], payload, left[granted], saved)
            saved[left[places["state"] == PRESENT]] = True
            left = left[places["state"] == PENDING]
            if len(granted):
                until = time.monotonic() + self._threads.limit_s
            elif time.monotonic() > until:
                return
            elif len(left):  # others write them, or a twin in this call
                with self._settled:
                    self._settled.wait(_SETTLE_S)

    def _write(  # noqa: PLR0913, PLR0917  the parts of one call
        self,
        call: DiskCall[NDArray[np.bool_]],
        store: Store,
        places: Places,
        payload: NDArray[np.uint8],
        rows: NDArray[np.intp],
        saved: NDArray[np.bool_],
    ) -> None:
        """Write the blocks of these rows to their places, and mark those that are saved."""
        first = 0
        try:
            order = np.argsort(places["offset"])
            places, rows = places[order], rows[order]
            ends = np.cumsum(places["size"], dtype=np.int64)
            while first < len(places):
                base = int(ends[first - 1]) if first else 0
                end = max(first + 1, int(np.searchsorted(ends, base + _SAVE_BYTES, "right")))
                part, first = slice(first, end), end  # it gives up its own places, and only once
                done = self._write_batch(call, store, places[part], payload, rows[part])
                saved[rows[part][done]] = True
        finally:
            store.abort(places[first:])
            with self._settled:
                self._settled.notify_all()

    def _write_batch(
        self,
        call: DiskCall[NDArray[np.bool_]],
        store: Store,
        places: Places,
        payload: NDArray[np.uint8],
        rows: NDArray[np.intp],
    ) -> NDArray[np.bool_]:
        """Write some blocks and their entries: which of them are saved."""
        done = np.zeros(len(places), np.bool_)
        try:
            call.step()
            if store.file.vanished():
                raise OSError(errno.ENOENT, "the file is gone")
            # What an entry in the file still claims must not be overwritten under it.
            written = store.flush(durable=False)
            call.step(int(places["size"].sum()))
            requests = self._write_data(store, places, payload, rows)
            good = requests["result"] == 0
            failures = requests["result"][~good]
            if len(failures):
                self.saves.failed(-int(failures[0]), len(failures))
            elif call.left:
                self.saves.succeeded()  # the disk goes on
            call.step()  # a caller who has left may have changed the bytes that were written
            places = places.copy()
            places["crc"] = requests["crc"]
            if good.any():
                written += int(places["size"][good].sum())
                written += store.publish(np.ascontiguousarray(places[good]))
                done = good
                self._count_saved(places[good], written)
                if not len(failures):
                    self.saves.succeeded()
        except OSError as error:
            self.saves.failed(error.errno or errno.EIO, len(places))
        finally:
            if not done.all():
                store.abort(np.ascontiguousarray(places[~done]))
        return done

    def _write_data(
        self,
        store: Store,
        places: Places,
        payload: NDArray[np.uint8],
        rows: NDArray[np.intp],
    ) -> Requests:
        """Write blocks: from their rows, if direct I/O can, and else from copies."""
        sources = payload.ctypes.data + rows.astype(np.uint64) * np.uint64(payload.strides[0])
        if (sources % PAGE == 0).all() and (places["length"] == places["size"]).all():
            requests = requests_of(places, sources)
            requests["source"] = sources
            store.engine.write(requests)
            return requests
        sizes = places["size"].astype(np.uint64)
        buffer = store.arena.take(int(sizes.sum()))
        requests = requests_of(places, buffer.ctypes.data + np.cumsum(sizes) - sizes)
        requests["source"] = sources
        store.engine.write(requests)
        return requests

    def _count_saved(self, places: Places, written: int) -> None:
        _SAVED_BLOCKS.add(len(places), tier=self.name)
        _SAVED_BYTES.add(int(places["length"].sum()), tier=self.name)
        _WRITTEN.add(written, tier=self.name)

    def _flush(self, call: DiskCall[Any], store: Store, *, durable: bool = False) -> bool:
        """Write what has changed in the index, and return whether that is done; if it fails, the
        next save or removal tries again.
        """
        if not self.saves.allows():
            return False
        call.step()
        try:
            if durable and store.file.vanished():
                raise OSError(errno.ENOENT, "the file is gone")
            _WRITTEN.add(store.flush(durable=durable), tier=self.name)
        except OSError as error:
            self.saves.failed(error.errno or errno.EIO)
            return False
        self.saves.succeeded()
        return True

    # ---- Loads

    def _read(  # noqa: PLR0913, PLR0917  the parts of one call
        self,
        call: DiskCall[list[StoredBlock | None]],
        store: Store,
        keys: Keys,
        records: NDArray[np.void],
        places: Places,
        blocks: list[StoredBlock | None],
    ) -> Keys:
        """Read the blocks that were found into ``blocks``, and return those that were damaged."""
        hits = np.flatnonzero(places["state"] == PRESENT)
        if len(hits) < len(keys):
            _MISSES.add(len(keys) - len(hits), tier=self.name)
        if not len(hits):
            return keys[:0]
        hits = hits[np.argsort(places["offset"][hits])]
        buffers, addresses = self._buffers(store, places["size"][hits])
        requests = requests_of(places[hits], addresses)
        call.step(int(requests["size"].sum()))
        store.engine.read(requests)
        self._read_again(call, store, requests)
        damaged = self._judge(call, store, keys[hits], requests["result"])
        good = np.flatnonzero(requests["result"] == 0)
        lengths = records["length"][hits[good]]
        for at, hit, size in zip(good.tolist(), hits[good].tolist(), lengths.tolist(), strict=True):
            blocks[hit] = StoredBlock(records[hit], buffers[at][:size])
        _LOADED_BLOCKS.add(len(good), tier=self.name)
        _LOADED_BYTES.add(int(lengths.sum(dtype=np.uint64)), tier=self.name)
        return damaged

    @staticmethod
    def _read_again(
        call: DiskCall[list[StoredBlock | None]], store: Store, requests: Requests
    ) -> None:
        """Read what failed once more, each alone: bits may have been flipped on their way, and a
        bad place of the disk fails all neighbors that were read with it.
        """
        patience = _RETRY_FAILURES
        for at in np.flatnonzero(requests["result"] != 0).tolist():
            if patience == 0 or call.left:
                break
            call.step()
            alone = requests[at : at + 1]
            wrong = alone["result"][0] == -errno.EBADMSG
            store.engine.read(alone)
            if alone["result"][0] != 0 and not wrong:
                patience -= 1

    @staticmethod
    def _buffers(
        store: Store, sizes: NDArray[np.uint32]
    ) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint64]]:
        """Return memory for blocks of these sizes: arrays, and their addresses. Blocks share
        buffers of at most ``_LEASE_BYTES``, so that neighbors of the file are neighbors in memory.
        """
        buffers: list[NDArray[np.uint8]] = []
        addresses = np.zeros(len(sizes), np.uint64)
        all_sizes, first = sizes.tolist(), 0
        while first < len(all_sizes):
            end, total = first, 0
            while end < len(all_sizes) and (end == first or total + all_sizes[end] <= _LEASE_BYTES):
                total += all_sizes[end]
                end += 1
            lease, start = store.arena.take(total), 0
            base = lease.ctypes.data
            for at in range(first, end):
                buffers.append(lease[start : start + all_sizes[at]])
                addresses[at] = base + start
                start += all_sizes[at]
            first = end
        return buffers, addresses

    def _judge(
        self,
        call: DiskCall[list[StoredBlock | None]],
        store: Store,
        keys: Keys,
        results: NDArray[np.int32],
    ) -> Keys:
        """Note how loads went, and drop and return the blocks whose bytes are wrong."""
        failures = results[results != 0]
        if not len(failures):
            self.loads.succeeded()
            return keys[:0]
        wrong = np.ascontiguousarray(keys[results == -errno.EBADMSG])
        others = failures[failures != -errno.EBADMSG]
        if len(wrong):
            self.loads.failed(errno.EBADMSG, len(wrong))
            _DAMAGED.add(store.remove(wrong), tier=self.name)
            self._flush(call, store)
        if len(others):
            self.loads.failed(-int(others[0]), len(others))
        if len(failures) < len(results):
            self.loads.succeeded()
        return wrong

    # ---- Life

    @contextmanager
    def _working(self) -> Iterator[Store | None]:
        """Use the store for a call that touches the disk."""
        if self.loads.failing or self.saves.failing:
            self._reopen()
        with self._entered() as store:
            yield store

    @contextmanager
    def _entered(self) -> Iterator[Store | None]:
        """Use the store, which is not closed meanwhile; None after :meth:`close`. Only the threads
        of calls do, where no interrupt comes.
        """
        with self._lock:
            store = None if self._closed else self._store
            if store is not None:
                store.users += 1
        try:
            yield store
        finally:
            if store is not None:
                self._leave(store)

    def _leave(self, store: Store) -> None:
        with self._lock:
            store.users -= 1
            last = store.users == 0 and store is not self._store
        if last:
            store.close()

    def _reopen(self) -> None:
        """If the file of a disk that fails is gone, open the one that is at its path now."""
        if not self._reopening.acquire(blocking=False):
            return
        try:
            with self._entered() as old:
                if old is None or not (self.loads.allows() and self.saves.allows()):
                    return
                if not old.file.vanished():
                    return
                try:
                    new = Store(self._settings, self._arena)
                except TierError:
                    self.saves.failed(errno.ENOENT)
                    return
                self._replace(old, new)
        finally:
            self._reopening.release()

    def _replace(self, old: Store, new: Store) -> None:
        keys = old.keys()
        with self._lock:
            if self._closed:
                unused = new
            else:
                self._store, unused = new, old
            idle = unused.users == 0
        if idle:
            unused.close()
        if unused is old:
            self.loads.succeeded()
            self.saves.succeeded()
            self._lost(np.ascontiguousarray(keys[~new.has(keys)]))

    def _forget(self) -> None:
        """Leave the file to the parent, in a forked child: its lock is the parent's."""
        store, self._store, self._closed = self._store, None, True
        self._lock, self._settled = threading.Lock(), threading.Condition()
        self._threads = DiskThreads(self._threads.limit_s)
        if store is not None:
            store.file.close()


def _nothing() -> None:
    """Leave the file to the call that hangs on it, which closes it when it ends."""


def _nobody(keys: Keys) -> None:
    """Hear of lost blocks where nobody wants to."""


def _gauge(ref: weakref.ref[DiskTier], name: str) -> float:
    tier = ref()
    return 0.0 if tier is None else float(tier.stat().get(name, 0))


def _breaker(ref: weakref.ref[DiskTier]) -> float:
    """Return the state of a circuit breaker: loads or saves are paused, or being tried again."""
    tier = ref()
    ways = () if tier is None else (tier.loads, tier.saves)
    return max((way.failing + (not way.allows()) for way in ways), default=0)


def _checked_keys(keys: Keys) -> Keys:
    """Return keys for C. Raises TierError if they are not keys."""
    keys = np.ascontiguousarray(keys)
    if keys.dtype != np.uint64 or keys.ndim != _PAYLOAD_DIMENSIONS or keys.shape[1] != 2:
        raise TierError(
            f"keys have type {keys.dtype} and shape {keys.shape}; give uint64 (count, 2)"
        )
    return keys


def _checked(
    records: NDArray[np.void], payload: NDArray[np.uint8]
) -> tuple[NDArray[np.void], NDArray[np.uint8]]:
    """Return records and payload for C. Raises TierError if they do not fit each other."""
    records = np.ascontiguousarray(records)
    if records.dtype != BLOCK or records.ndim != 1:
        raise TierError(f"records have type {records.dtype}; give tiers.BLOCK, shape (count,)")
    if payload.dtype != np.uint8 or payload.ndim != _PAYLOAD_DIMENSIONS:
        raise TierError(
            f"the payload has type {payload.dtype}, shape {payload.shape}; give uint8 rows"
        )
    if len(payload) != len(records):
        raise TierError(f"there are {len(records)} records and {len(payload)} rows of payload")
    if len(records) and int(records["length"].max()) > payload.shape[1]:
        raise TierError(f"a block has {records['length'].max()} bytes, a row {payload.shape[1]}")
    if payload.strides[1] != 1 or payload.strides[0] < 0:
        payload = np.ascontiguousarray(payload)
    return records, payload
