# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The service of the lower tiers: moves blocks between the pool and the tiers below it.

It runs in the server's process, on threads of its own, outside of the poll loop. The server's index
says what to do (``csrc/index/lower.c``)::

    a block was committed  --take--> read it from the pool --> save it in the tiers    --tell-->
    a client wants a key   --take--> load it from a tier   --> put it into the pool    --tell-->

Offload is best effort: one thread does it, and a block that was evicted first is dropped. Onboard
must answer: other threads do it, so that no offload is ever before it, and each key that was taken
is told of, whatever happened.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from beluga.errors import BelugaError, TierError
from beluga.meta import LOWER_NOTE, BlockState, LowerWork, Work
from beluga.metrics import REGISTRY
from beluga.rpc import Client
from beluga.tiers.poolside import PoolSide, kinds
from beluga.tiers.tier import BLOCK
from beluga.transfer import IoHandle, LinkSettings, TransferClass, host_link

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.meta import MetaServer
    from beluga.pool import Pool
    from beluga.tiers.admission import Admission
    from beluga.tiers.tier import LowerTier, StoredBlock

TIERS_MAX = 7
"""A tier is a bit of a byte (``bl_tier_bit``); the pool has the first."""

_OFFLOAD_BATCH = 256  # blocks that are taken at once, the most of one call
_ARENA_SIZE = 32 << 20  # bytes of the pool that are read before they are saved
_ONBOARD_BYTES = 32 << 20  # bytes that one thread loads at once, about
_ONBOARD_BATCH = 128
_WAIT_S = 0.2
_RETRY_S = 0.05
_PUT_TRIES_S = 5.0  # for how long a block that came from a tier waits for space in the pool

_logger = logging.getLogger(__name__)

_OFFLOADED = REGISTRY.counter("beluga_offload_blocks_total", "Blocks saved in a lower tier.")
_OFFLOADED_BYTES = REGISTRY.counter("beluga_offload_bytes_total", "Bytes saved in a lower tier.")
_NOT_OFFLOADED = REGISTRY.counter(
    "beluga_offload_dropped_blocks_total", "Blocks that were not saved, by reason."
)
_ONBOARDED = REGISTRY.counter("beluga_onboard_blocks_total", "Blocks that came from a lower tier.")
_ONBOARDED_BYTES = REGISTRY.counter(
    "beluga_onboard_bytes_total", "Bytes that came from a lower tier."
)
_NOT_ONBOARDED = REGISTRY.counter(
    "beluga_onboard_missed_blocks_total", "Wanted blocks that did not come, by reason."
)
_ONBOARD_SECONDS = REGISTRY.histogram(
    "beluga_onboard_seconds", "The time from taking wanted keys to telling of them."
)
_OFFLOAD_SECONDS = REGISTRY.histogram(
    "beluga_offload_seconds", "The time from taking blocks to telling of them."
)


class TierService:
    """The tiers below one pool. Make it before the server starts, and start it after.

    ``tiers`` are asked in their order: put the fastest first. With ``wait``, the pool evicts a
    block only after it was offered to them; without it, what is evicted first is dropped.
    ``admission`` says what is saved; None saves everything. ``link`` is that of this host to the
    pool: None is its usual one, and False is none.

    Raises :class:`~beluga.errors.TierError` for more than 7 tiers or none.
    """

    def __init__(  # noqa: PLR0913  all but the first three named
        self,
        server: MetaServer,
        pool: Pool,
        tiers: Sequence[LowerTier],
        *,
        host: int | None = None,
        wait: bool = False,
        admission: Admission | None = None,
        link: LinkSettings | bool | None = None,
        onboard_threads: int = 2,
    ) -> None:
        if not 1 <= len(tiers) <= TIERS_MAX:
            raise TierError(f"{len(tiers)} lower tiers; a pool has 1 to {TIERS_MAX}")
        self._server, self._pool, self._host = server, pool, host
        self.tiers = tuple(tiers)
        self._admission = admission
        self._onboard_threads = onboard_threads
        held = [tier.keys() for tier in self.tiers]
        self._held = held
        unknown = any(keys is None for keys in held)
        count_max = sum(tier.block_count_max for tier in self.tiers)
        self._token = server.attach_lower(count_max, wait=wait, unknown=unknown)
        self._link_settings = link
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._block_size = 1 << 20  # of the last block that came: how many are loaded at once

    def start(self) -> None:
        """Tell the server what the tiers have, and begin. The server serves already."""
        client = Client(self._pool, host=self._host)
        self._work = LowerWork(client, self._token)
        self._clients = [client]
        self._handle = self._handle_of_link()
        for bit, keys in zip(self._bits(), self._held, strict=True):
            if keys is not None:
                self._tell(_notes(keys, stored=bit))
        self._held = []
        for bit, tier in zip(self._bits(), self.tiers, strict=True):
            tier.on_lost(functools.partial(self._lost, bit))
        self._run("offload", self._offload)
        for number in range(self._onboard_threads):
            self._run(f"onboard-{number}", self._onboard)

    def stop(self) -> None:
        """Finish what is under way, and end the threads. The tiers stay open."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        for client in getattr(self, "_clients", []):
            client.close()
        handle = getattr(self, "_handle", None)
        if handle is not None:
            handle.close()
            handle.link.close()

    def _handle_of_link(self) -> IoHandle | None:
        if self._link_settings is False:
            return None
        given = self._link_settings
        settings = given if isinstance(given, LinkSettings) else None
        try:
            return IoHandle(host_link(self._pool, settings))
        except (BelugaError, OSError) as error:
            _logger.warning("beluga: moves between tiers are not scheduled: %s", error)
            return None

    def _bits(self) -> list[int]:
        return [1 << number for number in range(1, len(self.tiers) + 1)]

    def _run(self, name: str, work: Callable[[PoolSide], None]) -> None:
        client = Client(self._pool, host=self._host)
        self._clients.append(client)

        def run() -> None:
            side = PoolSide(client, self._handle)
            while not self._stopping.is_set():
                try:
                    work(side)
                except (BelugaError, OSError) as error:
                    if self._stopping.is_set() or self._server.failure is not None:
                        return
                    _logger.warning("beluga: %s: %s", name, error)
                    self._stopping.wait(_RETRY_S)

        thread = threading.Thread(target=run, name=f"beluga-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _tell(self, notes: NDArray[np.void]) -> None:
        self._work.tell(notes)

    def _lost(self, bit: int, keys: NDArray[np.uint64]) -> None:
        if not self._stopping.is_set():
            self._tell(_notes(keys, lost=bit))

    # ---- Out of the pool.

    def _offload(self, side: PoolSide) -> None:
        """Wait for blocks that were committed or removed, and handle some of each."""
        waited = self._server.wait_lower(1 << Work.OFFLOAD | 1 << Work.REMOVE, _WAIT_S)
        if waited & 1 << Work.REMOVE:
            self._remove(self._work.take(Work.REMOVE, _OFFLOAD_BATCH))
        if not waited & 1 << Work.OFFLOAD:
            return
        started_s = time.perf_counter()
        records = self._work.take(Work.OFFLOAD, _OFFLOAD_BATCH)
        if not len(records):
            return
        stored = np.zeros(len(records), np.uint8)
        try:
            wanted = records["tiers"] == 0
            if self._admission is not None:
                admitted = np.zeros(len(records), np.bool_)
                admitted[wanted] = self._admission.admit(records["key"][wanted])
                _drop(int(np.count_nonzero(wanted & ~admitted)), "not admitted")
                wanted = admitted
            places = np.flatnonzero(wanted)
            for group in kinds(records[places]):
                self._save(side, records, places[group], stored)
        finally:  # blocks that are not told of could never be evicted
            notes = _notes(records["key"], stored=stored)
            notes["generation"], notes["block"] = records["generation"], records["block"]
            self._tell(notes)
        _OFFLOAD_SECONDS.observe(time.perf_counter() - started_s)

    def _save(
        self,
        side: PoolSide,
        records: NDArray[np.void],
        places: NDArray[np.intp],
        stored: NDArray[np.uint8],
    ) -> None:
        """Save blocks of one kind in every tier, and add the tiers that have them to ``stored``."""
        length = int(records[places[0]]["length"])
        stride = -(-length // 4096) * 4096
        many = max(_ARENA_SIZE // stride, 1)
        for first in range(0, len(places), many):
            if self._stopping.is_set():
                return
            some = places[first : first + many]
            payload = _aligned(len(some), stride)
            read = side.read(records[some], payload)
            _drop(int(np.count_nonzero(~read)), "evicted first")
            if not read.any():
                continue
            blocks = np.zeros(int(read.sum()), BLOCK)
            for name in ("key", "fingerprint", "length", "chunk_size"):
                blocks[name] = records[name][some][read]
            saved_any = np.zeros(len(blocks), np.bool_)
            rows = payload if read.all() else payload[read]
            for bit, tier in zip(self._bits(), self.tiers, strict=True):
                saved = tier.save(blocks, rows)
                stored[some[read][saved]] |= bit
                saved_any |= saved
                _OFFLOADED.add(int(saved.sum()), tier=tier.name)
                _OFFLOADED_BYTES.add(int(saved.sum()) * length, tier=tier.name)
            _drop(int(np.count_nonzero(~saved_any)), "not saved")

    def _remove(self, records: NDArray[np.void]) -> None:
        for tier in self.tiers:
            tier.remove(np.ascontiguousarray(records["key"]))
        self._tell(_notes(records["key"], lost=0xFF, ended=1))

    # ---- Into the pool.

    def _onboard(self, side: PoolSide) -> None:
        """Wait for keys that are wanted, and bring some of them."""
        waited = self._server.wait_lower(1 << Work.ONBOARD | 1 << Work.PREFETCH, _WAIT_S)
        for work, kind in (
            (Work.ONBOARD, TransferClass.ONBOARD),
            (Work.PREFETCH, TransferClass.PREFETCH),
        ):
            if not waited & 1 << work:
                continue
            started_s = time.perf_counter()
            many = min(max(_ONBOARD_BYTES // self._block_size, 1), _ONBOARD_BATCH)
            records = self._work.take(work, many)
            if len(records):
                self._bring(side, records, kind)
                _ONBOARD_SECONDS.observe(time.perf_counter() - started_s)
            return  # whoever waits for a block comes before the next to prefetch

    def _bring(self, side: PoolSide, records: NDArray[np.void], kind: TransferClass) -> None:
        notes = _notes(records["key"], ended=1)
        try:
            left = np.arange(len(records))
            for bit, tier, knows in zip(
                self._bits(), self.tiers, map(_knows, self.tiers), strict=True
            ):
                here = left[(records["tiers"][left] & bit) != 0] if knows else left
                if not len(here):
                    continue
                found = tier.load(np.ascontiguousarray(records["key"][here]))
                came = np.array([block is not None for block in found])
                notes["lost"][here[~came]] |= bit
                blocks = [block for block in found if block is not None]
                self._put(side, blocks, kind, tier.name)
                notes["stored"][here[came]] |= bit
                left = np.setdiff1d(left, here[came], assume_unique=True)
            if len(left):
                _NOT_ONBOARDED.add(len(left), reason="not found")
        finally:  # a key that is not told of would be awaited for nothing
            self._tell(notes)

    def _put(
        self, side: PoolSide, blocks: Sequence[StoredBlock], kind: TransferClass, name: str
    ) -> None:
        """Put blocks into the pool. Those that find no space are tried again for a while."""
        if not blocks:
            return
        records = np.array([block.record for block in blocks], BLOCK)
        until_s = time.monotonic() + _PUT_TRIES_S
        for group in kinds(records):
            some = [blocks[place] for place in group]
            self._block_size = max(len(some[0].payload), 1)
            while some:
                states = side.write(some, kind)
                refused = [
                    block
                    for block, state in zip(some, states, strict=True)
                    if state == BlockState.REFUSED
                ]
                came = len(some) - len(refused)
                _ONBOARDED.add(came, tier=name)
                if self._admission is not None:
                    self._admission.hit(came)
                _ONBOARDED_BYTES.add(came * self._block_size, tier=name)
                some = refused
                if some and (time.monotonic() > until_s or self._stopping.wait(0.002)):
                    _NOT_ONBOARDED.add(len(some), reason="no space in the pool")
                    break


def _knows(tier: LowerTier) -> bool:
    """Return whether the server was told of every block of a tier."""
    return tier.block_count_max > 0


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
    notes["key"], notes["stored"], notes["lost"], notes["ended"] = keys, stored, lost, ended
    return notes


def _aligned(count: int, stride: int) -> NDArray[np.uint8]:
    """Return an array of shape (count, stride) that begins at a page, as direct I/O wants it."""
    space = np.empty(count * stride + 4096, np.uint8)
    start = -space.__array_interface__["data"][0] % 4096
    return space[start : start + count * stride].reshape(count, stride)
