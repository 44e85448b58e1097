# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An open store: its file, its index in memory, and the engine that moves its bytes.

The index (csrc/disk/store.c) is a pure memory structure. This file reads it at start, and writes
the sectors that have changed. The engine moves bytes between memory and the file with many
concurrent requests: C does the work (csrc/disk/disk.c) without the GIL. Tests replace it by an
engine that injects faults.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib, record_dtype
from beluga.errors import TierError, raise_for_status
from beluga.index import EVICTIONS
from beluga.tiers.arena import Arena
from beluga.tiers.disk.file import PAGE, DiskSet, Owner, TierFile
from beluga.tiers.tier import BLOCK

REQUEST = record_dtype("bl_disk_request")
"""One range of the file, and its bytes in memory: ``bl_disk_request`` of csrc/api/disk.h."""

Requests: TypeAlias = NDArray[np.void]

PLACE = record_dtype("bl_store_place")
"""Location of a block: ``bl_store_place`` of csrc/api/disk.h."""

Places = NDArray[np.void]
Keys = NDArray[np.uint64]

ABSENT, PRESENT = int(lib.BL_STORE_ABSENT), int(lib.BL_STORE_PRESENT)
GRANTED, PENDING = int(lib.BL_STORE_GRANTED), int(lib.BL_STORE_PENDING)


_LOAD_BYTES = 2 << 20  # bytes of the index that one thread reads at a time
_LOAD_THREADS = 4
_LOAD_PIECE = 1 << 20
_FLUSH_SECTORS = 1024  # sectors per write


class DiskEngine(Protocol):
    """Executes requests on one file. Thread-safe; a call returns when all its requests are done.

    Each request gets its ``result``: 0, or a negative errno. -EBADMSG means that the bytes do not
    match the request's ``crc``.
    """

    def read(self, requests: Requests) -> None:
        """Read. The bytes are checked against ``crc``, unless ``length`` is 0."""

    def write(self, requests: Requests) -> None:
        """Write. Reads of other threads have priority. A request with a ``source`` is written from
        there, and its ``crc`` is computed.
        """

    def sync(self) -> int:
        """Make all writes durable. Returns 0, or a negative errno."""

    def close(self) -> None:
        """Free all resources. No call may be running."""


EngineMaker: TypeAlias = Callable[[int, int], DiskEngine]
"""Creates an engine for a file descriptor and a queue depth."""


class CoreEngine:
    """The engine in C, with io_uring or threads. Raises OSError if the kernel lacks io_uring."""

    def __init__(self, fd: int, depth: int, kind: str) -> None:
        self.kind = kind
        number = lib.BL_DISK_URING if kind == "uring" else lib.BL_DISK_THREADS
        out = ffi.new("bl_disk **")
        if (status := lib.bl_disk_create(out, fd, number, depth)) < 0:
            raise OSError(-status, f"creating a disk engine with {kind} failed")
        self._disk = out[0]

    def read(self, requests: Requests) -> None:
        """Read. The bytes are checked against ``crc``, unless ``length`` is 0."""
        status = lib.bl_disk_read(self._disk, c_requests(requests), len(requests))
        if status < 0:
            requests["result"] = status

    def write(self, requests: Requests) -> None:
        """Write. Reads of other threads have priority."""
        status = lib.bl_disk_write(self._disk, c_requests(requests), len(requests))
        if status < 0:
            requests["result"] = status

    def sync(self) -> int:
        """Make all writes durable. Returns 0, or a negative errno."""
        return lib.bl_disk_sync(self._disk)

    def close(self) -> None:
        """Free all resources. No call may be running."""
        lib.bl_disk_destroy(self._disk)


def c_requests(requests: Requests) -> core.bl_disk_request:
    """Convert requests for C."""
    return ffi.from_buffer("bl_disk_request[]", requests)


def make_engine(kind: str) -> EngineMaker:
    """Return the factory of an engine: ``uring``, ``threads``, or ``auto`` (io_uring where the
    kernel has it). Raises TierError for another name.
    """
    if kind not in ("auto", "uring", "threads"):
        raise TierError(f"there is no disk engine {kind!r}; give auto, uring or threads")

    def make(fd: int, depth: int) -> DiskEngine:
        if kind != "auto":
            return CoreEngine(fd, depth, kind)
        try:
            return CoreEngine(fd, depth, "uring")
        except OSError:
            return CoreEngine(fd, depth, "threads")

    return make


def requests_of(places: Places, addresses: NDArray[np.uint64]) -> Requests:
    """Build the requests that move these blocks to or from these addresses."""
    requests = np.zeros(len(places), REQUEST)
    for field in ("offset", "size", "length", "seed", "crc"):
        requests[field] = places[field]
    requests["bytes"] = addresses
    return requests


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The settings of a store; see :class:`beluga.tiers.disk.tier.DiskTier`."""

    path: Path
    size: int
    owner: Owner
    eviction: str
    smallest_block: int
    depth: int
    maker: EngineMaker
    disk_set: DiskSet | None = None
    missed: Callable[[], Keys] | None = None  # keys to remove from a disk that leaves its set


class Store:
    """An open store. Every method but :meth:`close` is thread-safe; :meth:`close` must be the last
    call.

    Raises TierError as :class:`TierFile` does, or when the index cannot be read.
    """

    def __init__(self, settings: StoreSettings, arena: Arena) -> None:
        if settings.eviction not in EVICTIONS:
            known = ", ".join(EVICTIONS)
            raise TierError(f"there is no disk eviction policy {settings.eviction!r}; give {known}")
        self.arena = arena
        self.users = 0  # running calls of this store; counted by the tier
        self.closed = False
        self.file = TierFile(
            settings.path,
            settings.size,
            settings.smallest_block,
            settings.owner,
            settings.disk_set,
        )
        self._flush_lock = threading.Lock()
        self._unsynced: list[NDArray[np.uint32]] = []  # sectors written since the last sync
        try:
            self.engine: DiskEngine = settings.maker(self.file.fd, settings.depth)
        except OSError as error:
            self.file.close()
            raise TierError(f"{self.file.path}: {error.strerror}") from error
        layout = self.file.layout
        out = ffi.new("bl_store **")
        status = lib.bl_store_create(
            out,
            layout.id,
            layout.slot_count,
            layout.data_offset,
            layout.stripe_count,
            EVICTIONS[settings.eviction],
        )
        if status < 0:
            self.engine.close()
            self.file.close()
            raise_for_status(status, f"the index of {self.file.path}")
        self._store = out[0]
        try:
            self._recover()
            if settings.disk_set is not None and self.file.leaves(settings.disk_set):
                self._leave(settings, settings.disk_set)
        except BaseException:
            self.close()
            raise

    def _leave(self, settings: StoreSettings, disk_set: DiskSet) -> None:
        """Leave the file's set for the one that it is in now: first execute the removals that the
        former one has not executed, because the file will not get them again.
        """
        try:
            keys = settings.missed() if settings.missed is not None else None
            if keys is not None and len(keys):
                self.remove(keys)
                self.flush(durable=True)
            self.file.join(disk_set)
        except OSError as error:
            raise TierError(f"{self.file.path}: {error.strerror}") from error

    def close(self) -> None:
        """Free all resources. No other method may be running or be called again."""
        self.engine.close()
        lib.bl_store_destroy(self._store)
        self.file.close()
        self.closed = True

    # ---- The index in memory

    def find(self, keys: Keys) -> tuple[NDArray[np.void], Places]:
        """Find blocks and pin them. Returns their records and places."""
        records, places = np.zeros(len(keys), BLOCK), np.zeros(len(keys), PLACE)
        lib.bl_store_find(
            self._store,
            ffi.from_buffer("uint64_t[]", keys),
            len(keys),
            ffi.from_buffer("bl_store_record[]", records),
            ffi.from_buffer("bl_store_place[]", places),
        )
        return records, places

    def unpin(self, places: Places) -> None:
        """Unpin blocks, so that they may be evicted again."""
        lib.bl_store_unpin(self._store, ffi.from_buffer("bl_store_place[]", places), len(places))

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which blocks the store has."""
        is_there = np.zeros(len(keys), np.uint8)
        lib.bl_store_has(
            self._store,
            ffi.from_buffer("uint64_t[]", keys),
            len(keys),
            ffi.from_buffer("uint8_t[]", is_there),
        )
        return is_there.view(np.bool_)

    def reserve(self, records: NDArray[np.void]) -> Places:
        """Reserve space for blocks and return their places."""
        places = np.zeros(len(records), PLACE)
        lib.bl_store_reserve(
            self._store,
            ffi.from_buffer("bl_store_record[]", records),
            len(records),
            ffi.from_buffer("bl_store_place[]", places),
        )
        return places

    def abort(self, places: Places) -> None:
        """Free the reserved space of blocks."""
        lib.bl_store_abort(self._store, ffi.from_buffer("bl_store_place[]", places), len(places))

    def remove(self, keys: Keys) -> int:
        """Remove blocks. Returns how many there were."""
        return lib.bl_store_remove(self._store, ffi.from_buffer("uint64_t[]", keys), len(keys))

    def keys(self) -> Keys:
        """Return the keys of all blocks."""
        keys = np.zeros((self.stat()["blocks"] + 64, 2), np.uint64)
        while True:
            count = lib.bl_store_keys(self._store, ffi.from_buffer("uint64_t[]", keys), len(keys))
            if count <= len(keys):
                return keys[:count]
            # Other threads may have saved blocks meanwhile
            keys = np.zeros((count + 64, 2), np.uint64)

    def take_evicted(self) -> Keys:
        """Return the keys of blocks evicted since the last call."""
        batches = []
        while True:
            keys = np.zeros((256, 2), np.uint64)
            count = lib.bl_store_take_evicted(
                self._store, ffi.from_buffer("uint64_t[]", keys), len(keys)
            )
            batches.append(keys[:count])
            if count < len(keys):
                return np.concatenate(batches)

    def stat(self) -> dict[str, int]:
        """Return the counts of ``bl_store_stat``."""
        stat = ffi.new("bl_store_stat *")
        lib.bl_store_stat_read(self._store, stat)
        return {
            "blocks": stat.block_count,
            "block_bytes": stat.block_bytes,
            "used_bytes": stat.used_bytes,
            "data_bytes": stat.data_bytes,
            "slots": stat.slot_count,
            "evicted": stat.evicted_count,
            "damaged": stat.damaged_count,
            "dirty": stat.dirty_count,
        }

    # ---- The index in the file

    def publish(self, places: Places) -> int:
        """Make the entries of written blocks durable; then readers can find them.

        Returns how many bytes of the index were written. Raises OSError, and leaves the blocks
        unchanged, if the index cannot be written.
        """
        array = ffi.from_buffer("bl_store_place[]", places)
        lib.bl_store_fill(self._store, array, len(places))
        written = self.flush(durable=True)
        lib.bl_store_commit(self._store, array, len(places))
        return written

    def flush(self, *, durable: bool) -> int:
        """Write all changed sectors of the index, and return their size in bytes. With ``durable``,
        they survive a power failure, with all data written before.

        One thread writes at a time, so two versions of a sector are never in flight; a thread that
        waited may find its sectors already written. Raises OSError; the next call writes the
        sectors again.
        """
        written = 0
        with self._flush_lock:
            while size := self._flush_some():
                written += size
            if durable and self._unsynced:
                status = self.engine.sync()
                if status < 0:
                    # A later sync may succeed without them: the kernel drops pages whose write
                    # failed.
                    for sectors in self._unsynced:
                        self._mark_dirty(sectors)
                    self._unsynced.clear()
                    raise OSError(-status, "the disk failed to make its bytes durable")
                self._unsynced.clear()
        return written

    def _mark_dirty(self, sectors: NDArray[np.uint32]) -> None:
        """Mark sectors to be written again."""
        lib.bl_store_mark_dirty(self._store, ffi.from_buffer("uint32_t[]", sectors), len(sectors))

    def _flush_some(self) -> int:
        buffer = self.arena.take(_FLUSH_SECTORS * PAGE)
        sectors = np.zeros(_FLUSH_SECTORS, np.uint32)
        c_sectors = ffi.from_buffer("uint32_t[]", sectors)
        count = lib.bl_store_take(
            self._store, c_sectors, ffi.from_buffer("uint8_t[]", buffer), _FLUSH_SECTORS
        )
        if count == 0:
            return 0
        requests = np.zeros(count, REQUEST)
        requests["offset"] = PAGE + sectors[:count].astype(np.uint64) * PAGE
        requests["bytes"] = buffer.ctypes.data + np.arange(count, dtype=np.uint64) * PAGE
        requests["size"] = PAGE
        self.engine.write(requests)
        failed = requests["result"] != 0
        if failed.any():
            self._mark_dirty(sectors[:count])
            raise OSError(-int(requests["result"][failed][0]), "the index cannot be written")
        self._unsynced.append(sectors[:count])
        return count * PAGE

    def _recover(self) -> None:
        ranges = [
            (offset, min(_LOAD_BYTES, end - offset))
            for first, end in self.file.index_ranges()
            for offset in range(first, end, _LOAD_BYTES)
        ]
        with ThreadPoolExecutor(_LOAD_THREADS) as threads:
            checked = threads.map(self._check_part, ranges)
            lib.bl_store_expect(self._store, sum(ranges[-1]) // PAGE - 1 if ranges else 0)
            for first, count in checked:
                lib.bl_store_claim(self._store, first, count)
        raise_for_status(lib.bl_store_recover(self._store), f"the index of {self.file.path}")

    def _check_part(self, part: tuple[int, int]) -> tuple[int, int]:
        """Read a part of the index and check its entries. Returns its first sector and its sector
        count.
        """
        offset, size = part
        base = int(ffi.cast("uintptr_t", lib.bl_store_entries(self._store))) + offset - PAGE
        requests = np.zeros(-(-size // _LOAD_PIECE), REQUEST)
        starts = np.arange(len(requests), dtype=np.uint64) * _LOAD_PIECE
        requests["offset"] = offset + starts
        requests["bytes"] = base + starts
        requests["size"] = np.minimum(size - starts, _LOAD_PIECE)
        self.engine.read(requests)
        if (requests["result"] != 0).any():
            code = -int(requests["result"][requests["result"] != 0][0])
            raise TierError(
                f"the index of {self.file.path} cannot be read (errno {code}, "
                f"{errno.errorcode.get(code, 'unknown')}); give another disk, or remove the file"
            )
        sectors = (offset - PAGE) // PAGE, size // PAGE
        lib.bl_store_check(self._store, *sectors)
        return sectors
