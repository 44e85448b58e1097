# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Store and fetch KV blocks by key: one C call per batch, no Python per block in between."""

from __future__ import annotations

import dataclasses
import errno
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from beluga._ffi import core, ffi, lib
from beluga.errors import CacheError, LayoutError, TransferCancelledError, raise_for_status
from beluga.kvcache.buffers import Run, runs
from beluga.kvcache.carry import EngineBatch
from beluga.kvcache.keys import Namespace, fold
from beluga.kvcache.uninterrupted import Uninterrupted
from beluga.meta import BlockState, MetaClient
from beluga.rpc import Client, nanoseconds
from beluga.transfer import Direction, Leave, TransferClass, choose, tuned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from beluga.kvcache.buffers import Blocks
    from beluga.kvcache.uninterrupted import Left
    from beluga.meta import MetaStat, Pins
    from beluga.pool import Pool
    from beluga.transfer import (
        Carried,
        Engine,
        Link,
        LinkSettings,
        Place,
        Plan,
        Slots,
    )

Digests: TypeAlias = "Sequence[bytes] | NDArray[np.uint8] | NDArray[np.uint64]"
"""A batch of names: digests as bytes or packed into an array, or keys that are folded already."""

CHUNK_SIZE: int = lib.BL_CHUNK_SIZE
_LINE_SIZE: int = lib.BL_LINE_SIZE
BLOCK_SIZE_MAX: int = lib.BL_EXTENT_STRIPES_MAX * lib.BL_STRIPE_SIZE


@dataclasses.dataclass(frozen=True, slots=True)
class PutResult:
    """What became of each block: GRANTED (stored now), HIT (was there), PENDING (another session
    writes it) or REFUSED; ``statuses`` has a negative error where it was refused."""

    states: NDArray[np.uint8]
    statuses: NDArray[np.int32]

    def _count(self, state: BlockState) -> int:
        return int(np.count_nonzero(self.states == state))

    @property
    def stored(self) -> int:
        """Blocks that this call wrote."""
        return self._count(BlockState.GRANTED)

    @property
    def present(self) -> int:
        """Blocks that the pool had already."""
        return self._count(BlockState.HIT)

    @property
    def pending(self) -> int:
        """Blocks that another session is writing."""
        return self._count(BlockState.PENDING)

    @property
    def refused(self) -> int:
        """Blocks that were not stored."""
        return self._count(BlockState.REFUSED)

    def raise_for_refused(self) -> None:
        """Raise the error of the first block that was refused, if one was."""
        for code in self.statuses[self.states == BlockState.REFUSED]:
            raise_for_status(int(code), "storing a block")
            raise CacheError("a block was refused without a reason")


@dataclasses.dataclass(frozen=True, slots=True)
class GetResult:
    """``hits`` leading blocks were copied and verified; targets after them are undefined.

    ``mismatches`` counts blocks whose bytes or entry were not what was committed: each was read
    again and, if that did not help, is a miss. Misses because another server took over are not
    counted: nothing is known to be wrong with those blocks.
    """

    hits: int
    states: NDArray[np.uint8]
    mismatches: int


class KVCache:
    """KV blocks of one namespace in a pool.

    ``namespace`` says whose blocks these are: two caches with different namespaces never see each
    other's. ``check_checksums`` compares every fetched byte with the checksums that it was stored
    with (entries are always checked). ``engine`` copies: ``auto``, the CPU and other engines that
    the machine has for what they are faster at; the name of an engine
    (:func:`beluga.transfer.engine_names`); or one of yours. Blocks lie wherever the engine reaches,
    as a :class:`~beluga.kvcache.Run` of addresses. ``threads`` of the CPU share the copying of a
    get; a put is one thread's. With a ``link`` (a :class:`~beluga.transfer.Link`, a place at one,
    or the settings of this host's link to the pool) bytes move in turns with all who use it, puts
    in the class ``write_class`` and gets in ``read_class``; None: as fast as they can. ``kept``
    blocks are never evicted: tasks of the queue whose number is :attr:`fingerprint`, few and
    bounded (:class:`beluga.meta.TaskClient`). Used by one thread at a time, as its
    :class:`~beluga.rpc.Client`.

    Keys are digests of 16..64 uniformly random bytes (what engines have), as a list of bytes or a
    uint8 array of shape (count, size); or already folded, as a uint64 array of shape (count, 2):
    then the namespace is not in them, and a block of another one is present to put but misses get.
    Raises :class:`~beluga.errors.LayoutError` for chunks that are not whole lines, or no threads.
    """

    def __init__(  # noqa: PLR0913  all but the first two named
        self,
        pool_or_client: Pool | Client,
        *,
        namespace: Namespace | str | bytes,
        host: int | None = None,
        check_checksums: bool = True,
        chunk_size: int = CHUNK_SIZE,
        timeout_s: float = 5.0,
        engine: Engine | str = "auto",
        threads: int = 1,
        link: Link | LinkSettings | Place | None = None,
        read_class: TransferClass = TransferClass.ONBOARD,
        write_class: TransferClass = TransferClass.OFFLOAD,
        kept: bool = False,
    ) -> None:
        if threads < 1:
            raise LayoutError(f"a cache of {threads} threads; give it at least one")
        if not 0 <= chunk_size <= BLOCK_SIZE_MAX or chunk_size % _LINE_SIZE:
            raise LayoutError(
                f"chunks of {chunk_size} bytes; give whole lines of 64, up to {BLOCK_SIZE_MAX} "
                "bytes, or 0 for none"
            )
        read_class, write_class = TransferClass(read_class), TransferClass(write_class)
        if isinstance(pool_or_client, Client):
            self.client, self._own_client = pool_or_client, False
        else:
            self.client, self._own_client = (
                Client(pool_or_client, host=host, timeout_s=timeout_s),
                True,
            )
        self.namespace = Namespace.of(namespace)
        self._fingerprint = int.from_bytes(self.namespace.digest[:8], "little")
        self._check_checksums = check_checksums
        self._chunk_size = chunk_size
        self._timeout_ns = nanoseconds(timeout_s)
        self._meta = MetaClient(self.client)
        self._threads = threads
        self._kept = kept
        self._settings: core.bl_copy_settings | None = (
            None  # for C; found out before the first copy
        )
        self._batches = Uninterrupted()
        self._read_class, self._write_class = read_class, write_class
        try:
            self._chosen = choose(self.client.pool, engine, threads)
            classes = read_class, write_class
            self._leave = Leave(self.client.pool, link, self._chosen, *classes, threads=threads)
        except BaseException:
            self._end_session()
            raise
        self.client.pool.before_close(self.close)  # before the engine's

    def keys(self, digests: Digests) -> NDArray[np.uint64]:
        """Digests folded with the namespace: a uint64 array of shape (count, 2)."""
        if isinstance(digests, np.ndarray) and digests.dtype == np.uint64:
            if digests.ndim != 2 or digests.shape[1] != 2:
                raise ValueError(f"keys have shape (count, 2), these have {digests.shape}")
            return np.ascontiguousarray(digests)
        return fold(self.namespace, cast("Sequence[bytes] | NDArray[np.uint8]", digests))

    @property
    def fingerprint(self) -> int:
        """The 64 bits by which entries in the pool name this namespace."""
        return self._fingerprint

    def put(self, digests: Digests, sources: Blocks) -> PutResult:
        """Store ``sources[i]`` under ``digests[i]``: what is there already is not written again.

        Raises :class:`~beluga.errors.LayoutError` for unusable memory, and
        :class:`~beluga.errors.RpcError`; a block that finds no room is refused, not raised.
        """
        keys = self._paired(digests, sources)
        states = np.zeros(len(keys), dtype=np.uint8)
        statuses = np.zeros(len(keys), dtype=np.int32)
        for run in runs(sources, writable=False):
            _refuse_long(run)
            part = slice(run.start, run.start + run.count)
            raise_for_status(
                self._put(run, keys[part], states[part], statuses[part]), "storing blocks"
            )
        return PutResult(states, statuses)

    def get(self, digests: Digests, targets: Blocks) -> GetResult:
        """Fetch the leading blocks that the pool has into ``targets``.

        Raises :class:`~beluga.errors.LayoutError` and :class:`~beluga.errors.RpcError`.
        """
        keys = self._paired(digests, targets)
        states = np.zeros(len(keys), dtype=np.uint8)
        mismatches = ffi.new("uint64_t *")
        hits = 0
        for run in runs(targets, writable=True):
            _refuse_long(run)
            part = slice(run.start, run.start + run.count)
            found = raise_for_status(
                self._get(run, keys[part], states[part], mismatches), "fetching blocks"
            )
            hits += found
            if found < run.count:
                break
        return GetResult(hits, states, mismatches[0])

    def get_tokens(self, digests: Digests, tokens: ArrayLike, targets: Slots) -> GetResult:
        """Fetch some tokens of the leading blocks that the pool has.

        ``tokens`` are numbers in the one block of ``digests``, or of shape (count, 2): which of
        ``digests``, and its token. ``targets`` are as many slots of an engine's layout, the one in
        which the blocks were stored. With ``check_checksums`` the checksums of the chunks that they
        touch are compared, so those are fetched whole; without it only the tokens are. Rows of
        blocks that are no hits are undefined. Raises :class:`~beluga.errors.LayoutError` and
        :class:`~beluga.errors.RpcError`, and what the engine raises.
        """
        keys, layout = self.keys(digests), targets.layout
        rows = targets.rows(tokens, len(keys))
        states = np.zeros(len(keys), dtype=np.uint8)
        mismatches = ffi.new("uint64_t *")
        run = Run(len(keys), layout.length, 0, np.empty((0, 2), np.uint64))

        def fetch(carrier: EngineBatch) -> int:
            def parts_of(hits: NDArray[np.int64]) -> Iterable[tuple[NDArray[np.int64], Plan]]:
                some = rows if len(hits) == len(keys) else rows.of(hits)
                if len(some.sizes):
                    sums = carrier.checksums if self._check_checksums and self._chunk_size else None
                    yield (
                        hits,
                        layout.plan_rows(
                            some,
                            offsets=carrier.offsets,
                            chunk_size=self._chunk_size,
                            checksums=sums,
                        ),
                    )

            return carrier.get(states, mismatches, parts_of)

        found = raise_for_status(
            self._carry(self._leave.token_engine, run, keys, fetch), "fetching tokens"
        )
        return GetResult(found, states, mismatches[0])

    def lookup(self, digests: Digests) -> int:
        """How many leading blocks the pool has."""
        return len(self._meta.lookup(self.keys(digests)).hits)

    def pin(self, digests: Digests) -> Pins:
        """The leading blocks that the pool has, kept there until :meth:`release`."""
        return self._meta.pin(self.keys(digests))

    def release(self, pins: Pins) -> int:
        """Drop pins. How many were dropped: none twice, or after the session was lost."""
        return self._meta.unpin(pins)

    def remove(self, digests: Digests) -> int:
        """Forget blocks; how many there were."""
        return self._meta.remove(self.keys(digests))

    def stat(self) -> MetaStat:
        """The server's counters."""
        return self._meta.stat()

    @property
    def engine(self) -> Engine | None:
        """Who copies what C does not; None: C copies everything."""
        return self._leave.engine

    def carried(self, *, own: bool = False) -> dict[TransferClass, Carried]:
        """What was let onto the link for this cache, by class, and how long its pieces waited; of a
        place that several caches share, for all of them, or (``own``) nothing."""
        return self._leave.carried(own=own)

    def close(self) -> None:
        """Wait for what an interrupt has left behind, end the session, if the cache made it, and
        give back its place at the link, and the DSA if it found one."""
        self._batches.close()
        self._end_session()
        self._leave.close()
        self._chosen.close()

    def _end_session(self) -> None:
        if self._own_client:
            self.client.close()

    def _paired(self, digests: Digests, blocks: Blocks) -> NDArray[np.uint64]:
        keys = self.keys(digests)
        if len(keys) != len(blocks):
            raise LayoutError(f"{len(keys)} keys but {len(blocks)} blocks; give one key per block")
        return keys

    def _put(
        self,
        run: Run,
        keys: NDArray[np.uint64],
        states: NDArray[np.uint8],
        statuses: NDArray[np.int32],
    ) -> int:
        if (engine := self._engine_for(Direction.WRITE, run)) is not None:
            return self._carry(
                engine, run, keys, lambda carrier: carrier.put(run, states, statuses)
            )
        told = (
            ffi.from_buffer("uint8_t[]", states, require_writable=True),
            ffi.from_buffer("int32_t[]", statuses, require_writable=True),
        )
        with self._leave.using() as port:
            batch = self._batch(run, keys, self._write_class, port)
            with self.client.lock:
                code = lib.bl_kv_put(self.client.session, batch, *told)
        return self._ended(code, "storing blocks")

    def _get(
        self,
        run: Run,
        keys: NDArray[np.uint64],
        states: NDArray[np.uint8],
        mismatches: core.uint64_p,
    ) -> int:
        if (engine := self._engine_for(Direction.READ, run)) is not None:
            return self._carry(
                engine,
                run,
                keys,
                lambda carrier: carrier.get(states, mismatches, carrier.blocks(run)),
            )
        told = ffi.from_buffer("uint8_t[]", states, require_writable=True)
        with self._leave.using() as port:
            batch = self._batch(run, keys, self._read_class, port)
            with self.client.lock:
                code = lib.bl_kv_get(self.client.session, batch, told, mismatches)
        return self._ended(code, "fetching blocks")

    def _engine_for(self, direction: Direction, run: Run) -> Engine | None:
        size, fragments = run.count * run.length, run.count * run.fragment_count
        return self._leave.engine_for(direction, size, fragments)

    def _ended(self, code: int, doing: str) -> int:
        self._leave.watch()
        if code == -errno.ECANCELED:
            raise TransferCancelledError(f"{doing}: it was stopped")
        return int(code)

    def _carry(
        self,
        engine: Engine,
        run: Run,
        keys: NDArray[np.uint64],
        move: Callable[[EngineBatch], int],
    ) -> int:
        """What ``move`` returns of a batch, without interrupts."""

        def carry(left: Left) -> int:
            batch = self._batch(run, keys, self._read_class, ffi.NULL)  # the engine asks
            with self.client.lock:
                session, pool_size = self.client.session, self.client.pool.geometry.size
                return move(EngineBatch(engine, session, batch, pool_size, left))

        return self._batches.run(carry)

    def _batch(
        self,
        run: Run,
        keys: NDArray[np.uint64],
        kind: TransferClass,
        port: core.bl_port | core.Null,
    ) -> core.bl_kv_batch:
        if self._settings is None:
            self._settings = tuned(self.client.pool).struct(self._threads)
        return ffi.new(
            "bl_kv_batch *",
            {
                "keys": ffi.from_buffer("uint64_t[]", keys),
                "fragments": ffi.from_buffer("bl_fragment[]", run.fragments),
                "fingerprint": self._fingerprint,
                "timeout_ns": self._timeout_ns,
                "count": run.count,
                "fragment_count": run.fragment_count,
                "length": run.length,
                "chunk_size": self._chunk_size,
                "check_checksums": self._check_checksums,
                "settings": self._settings,
                "port": port,
                "transfer_class": kind,
                "kept": self._kept,
            },
        )

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_long(run: Run) -> None:
    if run.length > BLOCK_SIZE_MAX:
        raise LayoutError(f"a block of {run.length} bytes; the pool takes up to {BLOCK_SIZE_MAX}")
