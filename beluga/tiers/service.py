# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The service that moves blocks between the pool and the tiers below it.

It runs in the server's process, on its own threads, outside of the poll loop. The server's index
supplies the work (``csrc/index/lower.c``)::

    a block was committed  --take--> read it from the pool --> save it in the tiers    --report->
    a client needs a key   --take--> load it from a tier   --> put it into the pool    --report->

Offload is best effort: one thread does it, and a block that was evicted first is dropped. An
onboard has a waiting client: other threads do it, so that no offload delays it, and the outcome of
each key is reported in any case. These threads use only the first tier. A slower tier, such as a
store that may hang, has its own threads; they take the keys that only a store may have
(``Work.COLD``), so that a request for a disk never waits for a store.

The thread that saves to a tier also executes its removals, so that no save of the same block
follows. A removal is retried until it succeeds; the pool remembers it until then.
"""

from __future__ import annotations

import functools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import lib
from beluga.errors import BelugaError, TierError
from beluga.index import (
    COMMITTED,
    LOWER_NOTE,
    LOWER_RECORD,
    BlockState,
    IndexClient,
    LowerWork,
    Removal,
    Work,
    names_at,
    read_entries,
)
from beluga.metrics import REGISTRY
from beluga.rpc import Client
from beluga.threads import Thread
from beluga.tiers.counters import CountersService
from beluga.tiers.poolside import (
    PAGE_SIZE,
    PoolSide,
    add_names,
    kinds,
    named_length,
    padded,
    take_name,
)
from beluga.tiers.remote import RemoteTier, open_remote
from beluga.tiers.settings import LateTier, TierSettings
from beluga.tiers.tier import BLOCK, remove_durably, replaces
from beluga.transfer import IoHandle, LinkSettings, TransferClass, host_link

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.index import IndexServer
    from beluga.pool import Pool
    from beluga.tiers.admission import Admission
    from beluga.tiers.disk.file import DiskSet
    from beluga.tiers.tier import LowerTier, StoredBlock

TIERS_MAX = 7
"""A tier is a bit of a byte (``bl_tier_bit``); the pool has the first one."""

_OFFLOAD_BATCH = 256  # blocks per call
_ARENA_SIZE = 32 << 20  # bytes that are read from the pool before they are saved
_ONBOARD_BYTES = 32 << 20  # approximate bytes that one thread loads per call
_ONBOARD_BATCH = 128
_COLD_BATCH = 32  # keys per query of a store
_SLOW_SAVES = 4  # batches that wait for a slower tier
_SLOW_LOADS = 2  # threads that load from a slower tier
_WAIT_S = 0.2
_RETRY_S = 0.05
_REMOVE_AGAIN_S, _REMOVE_AGAIN_MAX_S = 0.05, 5.0  # delays of retries of failed removals
_OPEN_PERIOD_S = 2.0  # interval of attempts to open a late tier
# Fields of an entry
_COPIED = ("key", "fingerprint", "generation", "offset", "length", "chunk_size")
_REPLACED_MAX = 65536  # limit of remembered blocks that replaced removed ones
_PUT_TRIES_S = 5.0  # how long a loaded block waits for space in the pool

_logger = logging.getLogger(__name__)

_NOT_OFFLOADED = REGISTRY.counter(
    "beluga_offload_dropped_blocks_total", "Blocks that were not saved, by reason."
)
_ONBOARDED = REGISTRY.counter("beluga_onboard_blocks_total", "Blocks fetched from a lower tier.")
_ONBOARDED_BYTES = REGISTRY.counter(
    "beluga_onboard_bytes_total", "Bytes fetched from a lower tier."
)
_NOT_ONBOARDED = REGISTRY.counter(
    "beluga_onboard_missed_blocks_total", "Requested blocks that were not fetched, by reason."
)
_REMOVED = REGISTRY.counter("beluga_tier_removed_blocks_total", "Removals that a tier executed.")
_NOT_REMOVED = REGISTRY.counter(
    "beluga_tier_failed_removals_total", "Failed attempts to remove a block, which are repeated."
)
_FAILED = REGISTRY.counter(
    "beluga_tier_failed_work_total", "Batches of work on lower tiers that failed with an error."
)
_ONBOARD_SECONDS = REGISTRY.histogram(
    "beluga_onboard_seconds", "Time from taking requested keys to reporting their outcome."
)
_OFFLOAD_SECONDS = REGISTRY.histogram(
    "beluga_offload_seconds", "Time from taking blocks to reporting their outcome."
)


class TierService:
    """The tiers below one pool. Create it before the server starts, and start it afterwards.

    ``tiers`` are queried in order, so put the fastest first; the caller closes them. With ``wait``,
    the pool evicts a block only after it was offered to the tiers; without it, blocks that are
    evicted first are dropped. ``admission`` selects the blocks to save; None saves all. If
    ``tiers`` is a :class:`TierSettings`, it includes all of this: :meth:`start` opens the tiers
    (until then another server may use them) and :meth:`stop` closes them. With ``patient``, a disk
    that cannot be opened yet is opened as soon as possible, and the pool is served without it
    meanwhile.

    ``link`` is this host's link to the pool: None is the default one, and False disables
    throttling.

    Raises :class:`~beluga.errors.TierError` for more than 7 tiers or none.
    """

    def __init__(  # noqa: PLR0913  keyword-only but the first three
        self,
        server: IndexServer,
        pool: Pool,
        tiers: Sequence[LowerTier] | TierSettings,
        *,
        host: int | None = None,
        wait: bool = False,
        admission: Admission | None = None,
        link: LinkSettings | bool | None = None,
        onboard_threads: int = 2,
        patient: bool = False,
    ) -> None:
        self._server, self._pool, self._host = server, pool, host
        self._settings = tiers if isinstance(tiers, TierSettings) else None
        self._disk_set: DiskSet | None = None
        self._required: list[tuple[int | None, bool]] = []  # of each store, see RemoteTier.require
        self.tiers: tuple[LowerTier, ...] = ()
        if isinstance(tiers, TierSettings):
            wait, admission = tiers.waits, tiers.policy(server, pool)
            names, count_max = list(tiers.names), tiers.block_count_max(pool)
            self._disk_set = tiers.disk_set()
            numbers = [self._disk_set.number] * bool(tiers.disks)
            with ExitStack() as stack:
                stores = [stack.enter_context(closing(open_remote(url))) for url in tiers.remotes]
                numbers += self._store_numbers(names[len(numbers) :], stores)
            listed = [True] * bool(tiers.disks) + [False] * len(tiers.remotes)
        else:
            self.tiers = tuple(tiers)
            count_max = sum(tier.block_count_max for tier in tiers)
            listed = [_lists_keys(tier) for tier in tiers]
            names = _distinct(["disk" if _lists_keys(tier) else tier.name for tier in tiers])
            numbers = self._store_numbers(names, tiers)
        if not 1 <= len(listed) <= TIERS_MAX:
            raise TierError(f"there are {len(listed)} lower tiers; give 1 to {TIERS_MAX}")
        unknown = sum(_bit(number) for number, known in enumerate(listed) if not known)
        self._token = server.attach_lower(
            count_max, wait=wait, unknown=unknown, names=_distinct(names), numbers=numbers
        )
        self._saving = threading.Lock()  # held while saving to or removing from the first tier
        self.retries = [Retries() for _ in listed]
        self._admission, self._patient = admission, patient
        self._onboard_threads = onboard_threads
        self._link_settings = link
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._clients: list[Client] = []
        self._slow: list[_SlowTier] = []  # all tiers but the first
        self._handle: IoHandle | None = None
        self._counters: CountersService | None = None
        self._block_size = 1 << 20  # size of the last loaded block, which sets the batch size

    def start(self) -> None:
        """Report the tiers' keys to the server, and start. The server must be serving.

        Raises :class:`~beluga.errors.TierError` if a tier cannot be opened, and RpcError if the
        pool has no free lanes. It may be called again then.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            self._stopping.clear()
            raise

    def _start(self) -> None:
        if self._settings is not None:
            self.tiers = tuple(
                self._settings.open(
                    self._pool,
                    patient=self._patient,
                    disk_set=self._disk_set,
                    missed=self._missed,
                )
            )
        client = self._client()
        self._work = LowerWork(client, self._token)
        self._half = self._server.stat().epoch % 2  # half of the name table
        # A disk also saves blocks that only a remote store has (bl_lower_add).
        self._nearer = np.uint8(_bit(0) if _lists_keys(self.tiers[0]) else 0xFF)
        self._handle = self._handle_of_link()
        remotes = [tier for tier in self.tiers if isinstance(tier, RemoteTier)]
        for remote, required in zip(remotes, self._required, strict=True):
            remote.require(*required)
        for number, tier in enumerate(self.tiers):
            tier.on_lost(functools.partial(self._lost, _bit(number)))
        disk = self.tiers[0]
        late = disk if isinstance(disk, LateTier) and not self._open(disk) else None
        if late is None:
            self._report_keys()
        for number in range(1, len(self.tiers)):
            sides = [PoolSide(self._client(), self._handle) for _ in range(_SLOW_LOADS)]
            self._slow.append(_SlowTier(self, number, sides))
        self._run("offload", self._offload)
        for tier in self.tiers:
            if isinstance(tier, RemoteTier):
                self._spawn("probe", tier.probe)
        listed = [_lists_keys(tier) for tier in self.tiers]
        store = listed.index(False) if False in listed else 0  # the first tier for cold keys
        for number in range(self._onboard_threads):
            self._run(f"onboard-{number}", functools.partial(self._onboard, cold=store == 0))
        for number in range(_SLOW_LOADS if store else 0):
            self._loop(f"cold-{number}", functools.partial(self._onboard_cold, store))
        if late is not None:
            self._spawn("late", functools.partial(self._open_late, late))
        counters = CountersService(self._server)
        counters.start()
        self._counters = counters

    def _missed(self) -> NDArray[np.uint64]:
        """Return the keys whose removal from the former set of disks is pending."""
        former = None if self._disk_set is None else self._disk_set.former
        name = "" if former is None else "disk"
        return self._server.pending_removals(name, former or 0)

    def _store_numbers(self, names: Sequence[str], tiers: Sequence[LowerTier]) -> list[int]:
        """Return the numbers that removals in these tiers are recorded under; 0 for those that are
        no store. A store's is the one in the store, or, while it does not reply, the last one of
        its name. Such a tier is used once the store has confirmed it. All stores are queried at the
        same time, because the pool has no server meanwhile.
        """
        listed = [self._server.tier_numbers(name) for name in names]

        def number_of(tier: LowerTier, known: list[int]) -> int | None:
            return tier.store_number(known) if isinstance(tier, RemoteTier) else 0

        with ThreadPoolExecutor(TIERS_MAX, "beluga-store") as threads:
            answers = list(threads.map(number_of, tiers, listed))
        numbers = []
        for number, known in zip(answers, listed, strict=True):
            required = next(iter(known), secrets.randbits(32) | 1) if number is None else number
            if required:
                is_new = number is None and not known
                self._required.append((required if number is None else None, is_new))
            numbers.append(required)
        return numbers

    def stop(self) -> None:
        """Finish running work and stop the threads. Idempotent."""
        self._stopping.set()
        while self._threads:
            self._threads.pop().join()
        if self._counters is not None:
            self._counters.stop()
            self._counters = None
        while self._slow:
            self._slow.pop().close()
        while self._clients:
            self._clients.pop().close()
        if self._handle is not None:
            self._handle.close()
            self._handle.link.close()
            self._handle = None
        if self._settings is not None:
            for tier in self.tiers:
                tier.close()

    def _client(self) -> Client:
        client = Client(self._pool, host=self._host)
        self._clients.append(client)
        return client

    def _handle_of_link(self) -> IoHandle | None:
        if self._link_settings is False:
            return None
        given = self._link_settings
        settings = given if isinstance(given, LinkSettings) else None
        try:
            return IoHandle(host_link(self._pool, settings))
        except (BelugaError, OSError) as error:
            _logger.warning("moves between tiers are not throttled: %s", error)
            return None

    def save_missing(self, ending: threading.Event) -> Iterator[tuple[int, int]]:
        """Save every committed block that no tier has, including blocks that were not admitted
        before.

        Yields after each part how many blocks it checked, and how many of them still have no copy
        in a tier: they were evicted meanwhile, or the first tier refused them. Later blocks may
        evict earlier ones, see :meth:`only_in_pool`. Ends early once ``ending`` is set.
        """
        line = 0
        with Client(self._pool, host=self._host) as client:
            side = PoolSide(client, self._handle)
            for lines in read_entries(self._pool, self._half):
                committed = np.flatnonzero(lines["state"] == COMMITTED)
                for first in range(0, len(committed), _OFFLOAD_BATCH):
                    if ending.is_set() or self._stopping.is_set():
                        return
                    batch = committed[first : first + _OFFLOAD_BATCH]
                    records = np.zeros(len(batch), LOWER_RECORD)
                    for name in _COPIED:
                        records[name] = lines[name][batch]
                    records["block"] = line + batch
                    yield len(batch), self._save_batch_missing(client, side, records)
                line += len(lines)

    def only_in_pool(self) -> tuple[int, int]:
        """Compare every committed block with the tiers. Returns how many none of them has, and
        their bytes. A block that was saved may be missing: a later one has evicted it.
        """
        count = size = 0
        with Client(self._pool, host=self._host) as client:
            index = IndexClient(client)
            for lines in read_entries(self._pool, self._half):
                committed = lines[lines["state"] == COMMITTED]
                for first in range(0, len(committed), _OFFLOAD_BATCH):
                    batch = committed[first : first + _OFFLOAD_BATCH]
                    keys = np.ascontiguousarray(batch["key"])
                    missing = index.tiers(keys) & ~np.uint8(1) == 0
                    count += int(np.count_nonzero(missing))
                    size += int(batch["length"][missing].sum(dtype=np.int64))
        return count, size

    def _save_batch_missing(self, client: Client, side: PoolSide, records: NDArray[np.void]) -> int:
        """Save those of the records that no tier has. Returns how many no tier accepted."""
        index, keys = IndexClient(client), np.ascontiguousarray(records["key"])
        with self._saving:  # so a concurrent removal is executed afterwards
            missing = records[index.tiers(keys) & ~np.uint8(1) == 0]
            missing["stale"] = index.removing(np.ascontiguousarray(missing["key"]))
            stored = np.zeros(len(missing), np.uint8)
            for group in kinds(missing):
                self._save(side, missing, group, stored, np.ones(len(missing), np.bool_))
            self._work.report(_saved_notes(missing, stored)[stored != 0])
        return int(np.count_nonzero(stored == 0))

    def report(self, notes: NDArray[np.void]) -> None:
        """Report outcomes to the server."""
        self._work.report(notes)

    def _report_keys(self) -> None:
        """Report the tiers' keys. Until then, the server assumes that a tier may have any key."""
        for number, tier in enumerate(self.tiers):
            keys = tier.keys()
            if keys is not None:
                self._work.report(_notes(keys, stored=_bit(number)))
        self._server.lower_reported()

    def _open(self, late: LateTier) -> bool:
        """Replace a tier that could not be opened by the real one. Returns whether it is open."""
        tier = late.open()
        if tier is not None:
            tier.on_lost(functools.partial(self._lost, _bit(0)))
            self.tiers = (tier, *self.tiers[1:])
        return tier is not None

    def _open_late(self, tier: LateTier) -> None:
        """Open a tier as soon as possible."""
        while not self._stopping.wait(_OPEN_PERIOD_S):
            try:
                if self._open(tier):
                    self._report_keys()
                    return
            except Exception as error:
                if self._stopping.is_set() or self._server.failure is not None:
                    return
                _failed(tier.name, error)

    def _run(self, name: str, work: Callable[[PoolSide], None]) -> None:
        self._loop(name, functools.partial(work, PoolSide(self._client(), self._handle)))

    def _loop(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            while not self._stopping.is_set():
                try:
                    work()
                except Exception as error:  # after any error, continue with the next blocks (D17)
                    if self._stopping.is_set() or self._server.failure is not None:
                        return
                    _failed(name, error)
                    self._stopping.wait(_RETRY_S)

        self._spawn(name, run)

    def _spawn(self, name: str, run: Callable[[], None]) -> None:
        thread = Thread(target=run, name=f"beluga-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _lost(self, bit: int, keys: NDArray[np.uint64]) -> None:
        if not self._stopping.is_set():
            self._work.report(_notes(keys, lost=bit))

    # ---- Offload.

    def _offload(self, side: PoolSide) -> None:
        """Wait for blocks that were committed or removed, and process a batch of each."""
        waited = self._server.wait_lower(1 << Work.OFFLOAD | 1 << Work.REMOVE, _WAIT_S)
        if waited & 1 << Work.REMOVE:
            self._remove(self._work.take(Work.REMOVE, _OFFLOAD_BATCH))
        self._retry()
        if not waited & 1 << Work.OFFLOAD:
            return
        started_s = time.perf_counter()
        records = self._work.take(Work.OFFLOAD, _OFFLOAD_BATCH)
        if not len(records):
            return
        stored = np.zeros(len(records), np.uint8)
        offered = np.ones(len(records), np.bool_)
        try:
            wanted = records["tiers"] & self._nearer == 0
            if self._admission is not None:
                admitted = np.zeros(len(records), np.bool_)
                admitted[wanted] = self._admission.admit(records["key"][wanted])
                _drop(int(np.count_nonzero(wanted & ~admitted)), "not admitted")
                wanted = admitted
            rows = np.flatnonzero(wanted)
            for group in kinds(records[rows]):
                self._save(side, records, rows[group], stored, offered)
        finally:  # unreported blocks could not be evicted until the session ends
            notes = _notes(records["key"], stored=stored)
            notes["generation"], notes["block"] = records["generation"], records["block"]
            replaced = _saved_notes(records, stored)
            self._work.report(np.concatenate([notes[offered], replaced[replaced["removal"] != 0]]))
        _OFFLOAD_SECONDS.observe(time.perf_counter() - started_s)

    def _save(
        self,
        side: PoolSide,
        records: NDArray[np.void],
        rows: NDArray[np.intp],
        stored: NDArray[np.uint8],
        offered: NDArray[np.bool_],
    ) -> None:
        """Save the blocks of one kind in these rows in the first tier, and mark those that it has
        in ``stored``. The other tiers get them, too, unless their backlog is long. Blocks that a
        stop leaves unprocessed are not ``offered``: when the session ends, the server reclaims
        them.
        """
        length = int(records[rows[0]]["length"])
        count = max(_ARENA_SIZE // named_length(length), 1)
        for first in range(0, len(rows), count):
            if self._stopping.is_set():
                offered[rows[first:]] = False
                return
            batch = rows[first : first + count]
            names = names_at(self._pool, self._half, records[batch])
            named = bool(names["block_tokens"].any())
            payload = _aligned(len(batch), named_length(length) if named else padded(length))
            read = side.read(records[batch], payload)
            _drop(int(np.count_nonzero(~read)), "evicted first")
            if not read.any():
                continue
            batch, payload = batch[read], payload if read.all() else payload[read]
            blocks = np.zeros(len(batch), BLOCK)
            for name in ("key", "fingerprint", "length", "chunk_size"):
                blocks[name] = records[name][batch]
            add_names(blocks, payload, names[read])
            batch_records = records[batch]
            saved = _saved(self.tiers[0], 0, batch_records, blocks, payload)
            stored[batch[saved]] |= _bit(0)
            for number, other in enumerate(self._slow, 1):
                lacking = batch_records["tiers"] & np.uint8(_bit(number)) == 0
                if lacking.any():
                    other.save(batch_records[lacking], blocks[lacking], payload[lacking])

    def _remove(self, records: NDArray[np.void]) -> None:
        """Execute removals in their tiers, after all saves of their blocks."""
        for number in range(len(self.tiers)):
            of_tier = records[records["tiers"] == _bit(number)]
            if not len(of_tier):
                continue
            if number == 0:
                with self._saving:
                    self.remove_from(0, of_tier)
            else:
                self._slow[number - 1].remove(of_tier)

    def _retry(self) -> None:
        """Retry some of the failed removals."""
        if not self._server.wait_lower(1 << Work.RETRY, 0):
            return
        for number, retries in enumerate(self.retries):
            if retries.begin():
                records = self._work.take(Work.RETRY, _OFFLOAD_BATCH, tier=number + 1)
                if len(records):
                    self._remove(records)
                else:
                    retries.end(done=True)

    def remove_from(self, number: int, records: NDArray[np.void]) -> None:
        """Execute removals in this tier, and report each to the server. Called by the tier's
        thread.
        """
        removed = np.zeros(len(records), np.bool_)
        try:
            removed[:] = remove_durably(self.tiers[number], np.ascontiguousarray(records["key"]))
        except Exception as error:
            _failed(self.tiers[number].name, error)
        notes = _notes(records["key"])
        notes["generation"], notes["block"] = records["generation"], records["block"]
        notes["removal"] = np.where(removed, Removal.DONE, Removal.FAILED)
        self.retries[number].end(done=bool(removed.all()))
        _REMOVED.add(int(np.count_nonzero(removed)), tier=self.tiers[number].name)
        _NOT_REMOVED.add(int(np.count_nonzero(~removed)), tier=self.tiers[number].name)
        self._work.report(notes)

    # ---- Onboard.

    def _onboard(self, side: PoolSide, *, cold: bool) -> None:
        """Wait for requested keys, and load a batch of them; including ``cold`` ones if the first
        tier is a store.
        """
        works = [Work.ONBOARD, *[Work.COLD] * cold, Work.PREFETCH]
        waited = self._server.wait_lower(sum(1 << work for work in works), _WAIT_S)
        for work in works:
            if waited & 1 << work:
                records = self._take(work, _COLD_BATCH if work == Work.COLD else _ONBOARD_BATCH)
                prefetched = work == Work.PREFETCH
                kind = TransferClass.PREFETCH if prefetched else TransferClass.ONBOARD
                if len(records):
                    self.onboard(side, 0, records, kind)
                return  # requested blocks have priority over prefetches

    def _onboard_cold(self, number: int) -> None:
        """Wait for keys that only a store may have, and load a batch of them from this tier."""
        if self._server.wait_lower(1 << Work.COLD, _WAIT_S):
            records = self._take(Work.COLD, _COLD_BATCH)
            if len(records):
                self._slow[number - 1].onboard_now(records, TransferClass.ONBOARD)

    def _take(self, work: Work, count_max: int) -> NDArray[np.void]:
        return self._work.take(work, min(max(_ONBOARD_BYTES // self._block_size, 1), count_max))

    def onboard(
        self, side: PoolSide, number: int, records: NDArray[np.void], kind: TransferClass
    ) -> None:
        """Load keys from this tier into the pool. Keys that it does not have are passed to the next
        tier; the last one reports them as missing.
        """
        started_s = time.perf_counter()
        tier, bit = self.tiers[number], _bit(number)
        notes = _notes(records["key"])
        reported = np.zeros(len(records), np.bool_)
        try:
            bits = records["tiers"]
            may_have = (bits & bit != 0) | (bits == 0) | (not _lists_keys(tier))
            rows = np.flatnonzero(may_have & (records["stale"] & bit == 0))
            loaded = tier.load(np.ascontiguousarray(records["key"][rows])) if len(rows) else []
            blocks = [None if block is None else take_name(block) for block in loaded]
            is_hit = np.array([block is not None for block in blocks], np.bool_)
            notes["lost"][_lost(tier, records["key"], rows[~is_hit])] = bit
            notes["stored"][rows[is_hit]] = bit
            if not _lists_keys(tier):  # otherwise the pool would offer it to this tier, too
                self._work.report(notes[rows[is_hit]])
            self._put(side, [block for block in blocks if block is not None], kind, tier.name)
            reported[rows[is_hit]] = True
            if number + 1 == len(self.tiers):
                _NOT_ONBOARDED.add(int(np.count_nonzero(~reported)), reason="not found")
                reported[:] = True
            elif not reported.all():
                self._slow[number].onboard(records[~reported], kind)
        except BaseException:
            reported[:] = True  # clients would wait for an unreported key until their timeout
            raise
        finally:
            notes["ended"] = reported
            self._work.report(notes[reported | (notes["lost"] != 0)])
        _ONBOARD_SECONDS.observe(time.perf_counter() - started_s, tier=tier.name)

    def _put(
        self, side: PoolSide, blocks: Sequence[StoredBlock], kind: TransferClass, name: str
    ) -> None:
        """Put blocks into the pool. If there is no space, retry for a while."""
        if not blocks:
            return
        records = np.array([block.record for block in blocks], BLOCK)
        until_s = time.monotonic() + _PUT_TRIES_S
        for group in kinds(records):
            remaining = [blocks[row] for row in group]
            self._block_size = max(len(remaining[0].payload), 1)
            while remaining:
                states = side.write(remaining, kind)
                count = int(np.count_nonzero(states != BlockState.REFUSED))
                remaining = [remaining[row] for row in np.flatnonzero(states == BlockState.REFUSED)]
                _ONBOARDED.add(count, tier=name)
                _ONBOARDED_BYTES.add(count * self._block_size, tier=name)
                if self._admission is not None:
                    self._admission.hit(count)
                if remaining and (time.monotonic() > until_s or self._stopping.wait(0.002)):
                    _NOT_ONBOARDED.add(len(remaining), reason="no space in the pool")
                    break


class Retries:
    """Schedules retries of a tier's failed removals: after a delay, which doubles each time, or at
    once while they succeed. One batch runs at a time. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running = False
        self._delay_s, self._until = _REMOVE_AGAIN_S, 0.0

    def begin(self) -> bool:
        """Return whether the caller should retry some now; it must call :meth:`end` afterwards."""
        with self._lock:
            if self._running or self._clock() < self._until:
                return False
            self._running = True
            return True

    def end(self, *, done: bool) -> None:
        """Record whether the tier has executed all removals of the batch."""
        with self._lock:
            self._running = False
            self._delay_s = _REMOVE_AGAIN_S if done else min(2 * self._delay_s, _REMOVE_AGAIN_MAX_S)
            self._until = 0.0 if done else self._clock() + self._delay_s


class _SlowTier:
    """Moves blocks to and from a slower tier on its own threads, so that it does not delay the
    first tier. A save is dropped if many are waiting.
    """

    def __init__(self, service: TierService, number: int, sides: Sequence[PoolSide]) -> None:
        self._service, self._number = service, number
        self._tier = service.tiers[number]
        self._sides = queue.SimpleQueue[PoolSide]()
        for side in sides:
            self._sides.put(side)
        name = f"beluga-{self._tier.name}"
        self._loads = ThreadPoolExecutor(len(sides), thread_name_prefix=f"{name}-load")
        self._saves = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-save")
        self._room = threading.Semaphore(_SLOW_SAVES)
        self._replaced: dict[tuple[int, ...], int] = {}  # generations of blocks, by key

    def save(
        self, records: NDArray[np.void], blocks: NDArray[np.void], rows: NDArray[np.uint8]
    ) -> None:
        """Queue blocks to be saved, or drop them."""
        if not self._room.acquire(blocking=False):
            _drop(len(blocks), "tier is behind")
            return
        try:
            self._saves.submit(self._save, records, blocks, rows)
        except BaseException:
            self._room.release()
            raise

    def remove(self, records: NDArray[np.void]) -> None:
        """Queue removals, after the saves that were queued before."""
        self._saves.submit(self._remove, records)

    def onboard(self, records: NDArray[np.void], kind: TransferClass) -> None:
        """Queue keys to be loaded into the pool."""
        self._loads.submit(self.onboard_now, records, kind)

    def close(self) -> None:
        """Finish running work and drop the rest."""
        for threads in (self._loads, self._saves):
            threads.shutdown(cancel_futures=True)

    def _save(
        self, records: NDArray[np.void], blocks: NDArray[np.void], rows: NDArray[np.uint8]
    ) -> None:
        try:
            saved = _saved(self._tier, self._number, records, blocks, rows)
            stored = np.where(saved, np.uint8(_bit(self._number)), np.uint8(0))
            notes = _saved_notes(records, stored)[saved]
            self._replaced.update(
                (tuple(note["key"]), int(note["generation"]))
                for note in notes[notes["removal"] != 0]
            )
            self._service.report(notes)
        except Exception as error:
            _failed(self._tier.name, error)
        finally:
            self._room.release()

    def _remove(self, records: NDArray[np.void]) -> None:
        # A save in between has replaced the block, which ended its removal.
        replaced = self._replaced
        ended = [replaced.get(tuple(record["key"]), 0) > record["generation"] for record in records]
        try:
            self._service.remove_from(self._number, records[~np.array(ended, np.bool_)])
        except Exception as error:
            _failed(self._tier.name, error)
        if len(replaced) > _REPLACED_MAX:
            replaced.clear()

    def onboard_now(self, records: NDArray[np.void], kind: TransferClass) -> None:
        """Load keys into the pool."""
        side = self._sides.get()
        try:
            self._service.onboard(side, self._number, records, kind)
        except Exception as error:
            _failed(self._tier.name, error)
        finally:
            self._sides.put(side)


def _bit(number: int) -> int:
    """Return the bit of a tier; 0 is the first lower tier."""
    return 2 << number


def _saved(
    tier: LowerTier,
    number: int,
    records: NDArray[np.void],
    blocks: NDArray[np.void],
    rows: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    """Save blocks, and count those that the tier did not accept. A block whose removal failed is
    replaced.
    """
    stale = records["stale"] & np.uint8(_bit(number)) != 0
    saved = np.zeros(len(blocks), np.bool_)
    if stale.any():
        stale[stale] = ~remove_durably(tier, np.ascontiguousarray(blocks["key"][stale]))
    may_save = ~stale | replaces(tier)
    if may_save.all():
        saved[:] = tier.save(blocks, rows)
    elif may_save.any():
        saved[may_save] = tier.save(blocks[may_save], rows[may_save])
    _drop(len(blocks) - int(np.count_nonzero(saved)), f"not saved in {tier.name}")
    return saved


def _saved_notes(records: NDArray[np.void], stored: NDArray[np.uint8]) -> NDArray[np.void]:
    """Return notes for saved blocks: which tiers have stored them, and in which a save replaced a
    removed block.
    """
    notes = _notes(records["key"], stored=stored)
    replaced = records["stale"] & stored != 0
    notes["removal"] = np.where(replaced, Removal.REPLACED, Removal.NONE)
    notes["generation"] = np.where(replaced, records["generation"], 0)
    return notes


def _distinct(names: Sequence[str]) -> list[str]:
    """Make names unique."""
    return [
        f"{name} {names[:index].count(name) + 1}" if name in names[:index] else name
        for index, name in enumerate(names)
    ]


def _lists_keys(tier: LowerTier) -> bool:
    """Return whether the server has a complete list of a tier's keys."""
    return tier.block_count_max > 0


def _lost(tier: LowerTier, keys: NDArray[np.uint64], missed: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return which of the ``missed`` keys the tier no longer has. The others may only be unreadable
    for a while.
    """
    if not len(missed) or not _lists_keys(tier):
        return missed
    return missed[~tier.contains(np.ascontiguousarray(keys[missed]))]


def _failed(who: str, error: Exception) -> None:
    """Count an error that ended a batch of work, and log it (rate-limited)."""
    _FAILED.add(who=who)
    _logger.warning("beluga: %s: %s: %s", who, type(error).__name__, error)


def _drop(count: int, reason: str) -> None:
    if count:
        _NOT_OFFLOADED.add(count, reason=reason)


def _notes(
    keys: NDArray[np.uint64],
    *,
    stored: int | NDArray[np.uint8] = 0,
    lost: int = 0,
    ended: int = 0,
) -> NDArray[np.void]:
    notes = np.zeros(len(keys), LOWER_NOTE)
    notes["block"] = lib.BL_LOWER_NO_BLOCK
    notes["key"], notes["stored"], notes["lost"], notes["ended"] = keys, stored, lost, ended
    return notes


def _aligned(count: int, stride: int) -> NDArray[np.uint8]:
    """Return a page-aligned array of shape (count, stride), as direct I/O requires."""
    space = np.empty(count * stride + PAGE_SIZE, np.uint8)
    start = -space.__array_interface__["data"][0] % PAGE_SIZE
    return space[start : start + count * stride].reshape(count, stride)
