# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A tier on one disk: blocks in one file of bounded size.

A block's bytes are written first, then its entry in the index, then both are made durable; only
then does the block count as saved. A crash at any point leaves a whole block or a miss: entry and
bytes have their own checksums.

Operations on the disk run on a thread that the caller may leave (tiers/hanging.py). Operations on
the index in memory run directly and never wait for a disk.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga._shared import when_forked
from beluga.arguments import StrPath, path_of
from beluga.errors import TierError
from beluga.metrics import REGISTRY
from beluga.tiers.arena import Arena
from beluga.tiers.disk.file import PAGE, DiskSet, Owner
from beluga.tiers.disk.health import DirectionHealth
from beluga.tiers.disk.store import (
    GRANTED,
    PENDING,
    PRESENT,
    EngineMaker,
    Keys,
    Places,
    Requests,
    Store,
    StoreSettings,
    make_engine,
    requests_of,
)
from beluga.tiers.hanging import DiskCall, DiskThreads
from beluga.tiers.tier import (
    BREAKER_STATE,
    LOADED_BLOCKS,
    LOADED_BYTES,
    MISSED_BLOCKS,
    SAVED_BLOCKS,
    SAVED_BYTES,
    StoredBlock,
    check_blocks,
    check_keys,
)

_WRITTEN = REGISTRY.counter(
    "beluga_tier_written_bytes_total", "Bytes written to a tier's medium, with its index."
)
_DAMAGED = REGISTRY.counter(
    "beluga_tier_damaged_blocks_total", "Blocks that were dropped because they were damaged."
)
_GAUGES = {
    "blocks": REGISTRY.gauge("beluga_tier_blocks", "Blocks that a tier has."),
    "used_bytes": REGISTRY.gauge("beluga_tier_used_bytes", "Space that a tier's blocks take."),
    "data_bytes": REGISTRY.gauge("beluga_tier_data_bytes", "Space that a tier has for blocks."),
    "evicted": REGISTRY.gauge("beluga_tier_evicted_blocks", "Blocks that a tier has evicted."),
}

_LEASE_BYTES = 8 << 20  # size of a buffer that several loaded blocks share
_SAVE_BYTES = 32 << 20  # bytes written before their entries
_RETRY_FAILURES = 2  # failures of a load after which its other blocks are skipped
_SETTLE_S = 0.2  # interval at which a save checks whether another one has ended
_CLOSE_S = 0.005  # interval at which close() checks whether all calls have ended


class DiskTier:
    """A tier in a folder, a raw file or a block device: see :class:`beluga.tiers.tier.LowerTier`.

    At most ``size`` bytes of the disk are used. ``server`` is the name of the blocks' owner, and
    ``pool`` the id of its pool: a path of another server and another pool is refused. ``eviction``
    is the policy, ``smallest_block`` the block size that the index is made for. ``disk_set`` is the
    server's set of disks; None accepts any. ``missed`` returns the keys to remove if the disk
    leaves the former set. ``io`` is "uring", "threads", "auto" or the factory of an engine, and
    ``depth`` its concurrent requests per call.

    A disk hangs if an operation takes longer than ``limit_s`` plus one second per 4 MiB. Its caller
    then returns misses, or unsaved blocks. The memory and the space that the operation may still
    write are kept until it has ended.

    Raises TierError if the path is in use, damaged, foreign, or of another version or server, if
    there is no room, or if an argument is out of range.
    """

    def __init__(  # noqa: PLR0913  keyword-only but the first two
        self,
        path: StrPath,
        size: int,
        *,
        server: str = "",
        pool: str = "",
        eviction: str = "lru",
        smallest_block: int = 16 << 10,
        io: str | EngineMaker = "auto",
        depth: int = 32,
        limit_s: float = 10.0,
        disk_set: DiskSet | None = None,
        missed: Callable[[], Keys] | None = None,
    ) -> None:
        path = path_of("path", path)
        self.name = f"disk:{os.fspath(path)}"
        maker = make_engine(io) if isinstance(io, str) else io
        self._settings = StoreSettings(
            path,
            size,
            Owner(server, pool),
            eviction,
            smallest_block,
            depth,
            maker,
            disk_set,
            missed,
        )
        self._arena = Arena()
        self._store: Store | None = Store(self._settings, self._arena)
        self._first = self._store.file.layout.id  # the file that the tier was opened with
        self._closed = False
        self._lock = threading.Lock()  # guards the store and its users; never held during disk I/O
        # Notified when a save has ended; only used by threads of calls
        self._settled = threading.Condition()
        self._threads = DiskThreads(limit_s)
        self._lost: Callable[[Keys], None] = _ignore
        self._reopening = threading.Lock()
        self.loads = DirectionHealth(self.name, "load")
        self.saves = DirectionHealth(self.name, "save")
        when_forked(self)
        ref = weakref.ref(self)
        BREAKER_STATE.set(partial(_breaker, ref), tier=self.name)
        for name, gauge in _GAUGES.items():
            gauge.set(partial(_gauge, ref, name), tier=self.name)

    # ---- LowerTier

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Save blocks. Returns which of them are saved now, or were already."""
        return self.saving(records, payload).result()

    def load(self, keys: Keys) -> list[StoredBlock | None]:
        """Load blocks; a miss is None. :meth:`contains` returns which of the misses the tier still
        has: the disk fails, hangs, or is paused.
        """
        return self.loading(keys).result()

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which blocks the tier has, readable now or not. It has a block until it is
        evicted, removed, or found to be damaged. This does not use the disk.
        """
        keys = check_keys(keys)
        with self._lock:
            return np.zeros(len(keys), np.bool_) if self._store is None else self._store.has(keys)

    def remove(self, keys: Keys) -> int:
        """Remove blocks. Returns how many there were."""
        return self.removing(keys).result()[0]

    def remove_durably(self, keys: Keys) -> NDArray[np.bool_]:
        """Remove blocks durably. Returns which keys have no block left: all of them, or none if the
        disk fails. In that case no load returns them, but a restart may find them. So may one after
        the file was replaced while it was in use, because the former one may come back (a file
        system that is mounted again).
        """
        return np.full(len(keys), self.removing(keys).result()[1])

    # ---- The same, for a tier of several disks

    def saving(
        self,
        records: NDArray[np.void],
        payload: NDArray[np.uint8],
        rows: NDArray[np.intp] | None = None,
    ) -> DiskCall[NDArray[np.bool_]]:
        """Return a call that saves blocks: those in ``rows`` of the payload, or all."""
        saved = np.zeros(len(records), np.bool_)
        if rows is None:
            records, payload = check_blocks(records, payload)

        def work(call: DiskCall[NDArray[np.bool_]]) -> NDArray[np.bool_]:
            mine = check_blocks(records, payload if rows is None else payload[rows])
            with self._working() as store:
                if store is None or not len(records):
                    return saved
                if not self.saves.allows():
                    return store.has(np.ascontiguousarray(mine[0]["key"]))
                self._save_all(call, store, *mine, saved)
                evicted = store.take_evicted()
            self._notify_lost(call, evicted)
            return saved

        def hung() -> NDArray[np.bool_]:
            known: NDArray[np.bool_] = saved.copy()
            self.saves.failed(errno.ETIMEDOUT, int(np.count_nonzero(~known)))
            return known

        return DiskCall(self._threads, work, hung)

    def loading(self, keys: Keys) -> DiskCall[list[StoredBlock | None]]:
        """Return a call that loads blocks."""
        keys = check_keys(keys)

        def work(call: DiskCall[list[StoredBlock | None]]) -> list[StoredBlock | None]:
            blocks: list[StoredBlock | None] = [None] * len(keys)
            with self._working() as store:
                if store is None or not self.loads.allows():
                    MISSED_BLOCKS.add(len(keys), tier=self.name)
                    return blocks
                records, places = store.find(keys)
                try:
                    damaged = self._read(call, store, keys, records, places, blocks)
                finally:
                    store.unpin(places)
            self._notify_lost(call, damaged)
            return blocks

        def hung() -> list[StoredBlock | None]:
            self.loads.failed(errno.ETIMEDOUT, len(keys))
            return [None] * len(keys)

        return DiskCall(self._threads, work, hung)

    def removing(self, keys: Keys) -> DiskCall[tuple[int, bool]]:
        """Return a call that removes blocks. Its result is how many there were, and whether the
        removal is durable.
        """
        keys = check_keys(keys)
        counts: list[int] = []

        def work(call: DiskCall[tuple[int, bool]]) -> tuple[int, bool]:
            with self._working() as store:
                if store is None:
                    return 0, False
                counts.append(store.remove(keys))
                durable = self._flush(call, store, durable=True)
                return counts[0], durable and store.file.layout.id == self._first

        def hung() -> tuple[int, bool]:
            self.saves.failed(errno.ETIMEDOUT)
            return sum(counts), False

        return DiskCall(self._threads, work, hung)

    @property
    def block_count_max(self) -> int:
        """The largest number of blocks that the tier can have."""
        return self.stat().get("slots", 0)

    def keys(self) -> Keys:
        """Return the keys of all blocks that the tier has, shape (count, 2)."""
        with self._lock:
            return np.zeros((0, 2), np.uint64) if self._store is None else self._store.keys()

    @property
    def data_offset(self) -> int:
        """The offset of the data in the file."""
        with self._lock:
            return 0 if self._store is None else self._store.file.layout.data_offset

    def on_lost(self, lost: Callable[[Keys], None]) -> None:
        """Register ``lost(keys)``, which is called for evicted blocks and for blocks found to be
        damaged.
        """
        self._lost = lost

    def _notify_lost(self, call: DiskCall[Any], lost: Keys) -> None:
        call.lift_limit()
        if len(lost):
            self._lost(lost)

    def close(self) -> None:
        """Finish running calls and close the file. Idempotent. If the disk hangs, the file stays
        open and locked until its calls have ended.
        """
        if self._closed and self._store is None:
            return
        self._closed = True
        for gauge in (BREAKER_STATE, *_GAUGES.values()):
            gauge.remove(tier=self.name)
        DiskCall(self._threads, self._end, _leave_open, always=True).result()

    def _end(self, call: DiskCall[None]) -> None:
        with self._lock:
            store, self._store = self._store, None
            used = store is not None and store.users > 0
        if store is None:
            return
        if not used:
            store.close()
        while used and not call.abandoned:  # the last user of the store closes it
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
        """Save blocks. Waits for those that other threads are saving, unless the disk hangs."""
        remaining = np.arange(len(records))
        until = time.monotonic() + self._threads.limit_s
        while len(remaining):
            call.step()
            places = store.reserve(records[remaining])
            granted = np.flatnonzero(places["state"] == GRANTED)
            self._write(call, store, places[granted], payload, remaining[granted], saved)
            saved[remaining[places["state"] == PRESENT]] = True
            remaining = remaining[places["state"] == PENDING]
            if len(granted):
                until = time.monotonic() + self._threads.limit_s
            elif time.monotonic() > until:
                return
            elif len(remaining):  # other threads are writing them, or this call has them twice
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
        """Write the blocks in these rows to their places, and mark the saved ones."""
        first = 0
        try:
            order = np.argsort(places["offset"])
            places, rows = places[order], rows[order]
            ends = np.cumsum(places["size"], dtype=np.int64)
            while first < len(places):
                base = int(ends[first - 1]) if first else 0
                end = max(first + 1, int(np.searchsorted(ends, base + _SAVE_BYTES, "right")))
                # From here on, the call aborts its own places, and only once
                part, first = slice(first, end), end
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
        """Write some blocks and their entries. Returns which of them are saved."""
        done = np.zeros(len(places), np.bool_)
        try:
            call.step()
            if store.file.vanished():
                raise OSError(errno.ENOENT, "the file is gone")
            # Space that an entry in the file still refers to must not be overwritten.
            written = store.flush(durable=False)
            call.step(int(places["size"].sum()))
            requests = self._write_data(store, places, payload, rows)
            good = requests["result"] == 0
            failures = requests["result"][~good]
            if len(failures):
                self.saves.failed(-int(failures[0]), len(failures))
            elif call.abandoned:
                self.saves.succeeded()  # the disk works
            call.step()  # a caller who has left may have changed the bytes during the write
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
        """Write blocks: directly from their rows if direct I/O allows it, otherwise from copies."""
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
        SAVED_BLOCKS.add(len(places), tier=self.name)
        SAVED_BYTES.add(int(places["length"].sum()), tier=self.name)
        _WRITTEN.add(written, tier=self.name)

    def _flush(self, call: DiskCall[Any], store: Store, *, durable: bool = False) -> bool:
        """Write the changed sectors of the index. Returns whether that succeeded; if not, the next
        save or removal retries.
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
        """Read the found blocks into ``blocks``. Returns the damaged ones."""
        hits = np.flatnonzero(places["state"] == PRESENT)
        if len(hits) < len(keys):
            MISSED_BLOCKS.add(len(keys) - len(hits), tier=self.name)
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
        LOADED_BLOCKS.add(len(good), tier=self.name)
        LOADED_BYTES.add(int(lengths.sum(dtype=np.uint64)), tier=self.name)
        return damaged

    @staticmethod
    def _read_again(
        call: DiskCall[list[StoredBlock | None]], store: Store, requests: Requests
    ) -> None:
        """Read failed requests again one by one: bits may have flipped in transit, and a bad sector
        fails all neighbors in the same request.
        """
        patience = _RETRY_FAILURES
        for at in np.flatnonzero(requests["result"] != 0).tolist():
            if patience == 0 or call.abandoned:
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
        """Allocate memory for blocks of these sizes. Returns arrays and their addresses. Blocks
        share buffers of at most ``_LEASE_BYTES``, so that neighbors in the file are neighbors in
        memory.
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
        """Record the outcome of loads, and drop and return the damaged blocks."""
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

    # ---- Opening and closing

    @contextmanager
    def _working(self) -> Iterator[Store | None]:
        """Use the store for a call that uses the disk."""
        if self.loads.failing or self.saves.failing:
            self._reopen()
        with self._entered() as store:
            yield store

    @contextmanager
    def _entered(self) -> Iterator[Store | None]:
        """Use the store, which stays open meanwhile; yields None after :meth:`close`. Only threads
        of calls use this, where interrupts do not occur.
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
        """If the file of a failing disk was removed, open the file that is now at its path."""
        if not self._reopening.acquire(blocking=False):
            return
        try:
            with self._entered() as old:
                if old is None or not (self.loads.allows() and self.saves.allows()):
                    return
                if not old.file.vanished():
                    return
                try:
                    new = Store(replace(self._settings, disk_set=None), self._arena)
                except TierError:
                    self.saves.failed(errno.ENOENT)
                    return
                if new.file.layout.id != old.file.layout.id and not _emptied(new):
                    new.close()
                    self.saves.failed(errno.EIO)
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

    def _after_fork(self) -> None:
        """Drop the file in a forked child: its lock belongs to the parent."""
        store, self._store, self._closed = self._store, None, True
        self._lock, self._settled = threading.Lock(), threading.Condition()
        self._threads = DiskThreads(self._threads.limit_s)
        if store is not None:
            store.file.close()


def _emptied(store: Store) -> bool:
    """Drop the blocks of another file, which has missed removals. Returns whether that is
    durable.
    """
    keys = store.keys()
    if not len(keys):
        return True
    try:
        store.remove(keys)
        store.flush(durable=True)
    except OSError:
        return False
    return True


def _leave_open() -> None:
    """Do nothing: the call that hangs on the file closes it when it ends."""


def _ignore(keys: Keys) -> None:
    """No-op callback."""


def _gauge(ref: weakref.ref[DiskTier], name: str) -> float:
    tier = ref()
    return 0.0 if tier is None else float(tier.stat().get(name, 0))


def _breaker(ref: weakref.ref[DiskTier]) -> float:
    """Return the state of the circuit breaker: whether loads or saves are paused or tried again."""
    tier = ref()
    ways = () if tier is None else (tier.loads, tier.saves)
    return max((way.failing + (not way.allows()) for way in ways), default=0)
