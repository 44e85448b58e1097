# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Store and fetch KV blocks by key: one call into C moves a whole batch."""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from beluga._ffi import core, ffi, lib
from beluga._shared import OfThisProcess
from beluga.arguments import of_type, short, whole
from beluga.errors import (
    BadValueError,
    CacheError,
    ChecksumError,
    LayoutError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    UnsettledError,
    raise_for_status,
)
from beluga.index import BLOCK_RECORD, NAME, BlockState, IndexClient
from beluga.kvcache.buffers import BLOCK_SIZE_MAX, Run, runs
from beluga.kvcache.engine import EngineTable
from beluga.kvcache.keys import Namespace, fold, leave_namespace
from beluga.kvcache.ring import OpTicket, OpWorker
from beluga.rpc import Client, nanoseconds
from beluga.transfer import (
    CopySettings,
    IoHandle,
    Link,
    LinkSettings,
    Slots,
    TransferClass,
    TransferStats,
    choose_engine,
    host_link,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

    from beluga.index import IndexStat, Pins
    from beluga.kvcache.buffers import Blocks
    from beluga.pool import Pool
    from beluga.transfer import CopyEngine


_logger = logging.getLogger(__name__)

Digests: TypeAlias = "Sequence[bytes] | NDArray[np.uint8] | NDArray[np.uint64]"
"""The names of a batch: digests as bytes or packed into an array, or folded keys."""

_NOT_THE_ENGINE = (ChecksumError, TransferCancelledError, TransferTimeoutError, UnsettledError)
"""Errors after which the CPU would fail, too."""

_ROWS = {"names": "NAME", "records": "BLOCK_RECORD"}
CHUNK_SIZE: int = lib.BL_CHUNK_SIZE
_LINE_SIZE: int = lib.BL_LINE_SIZE
_GRANTED, _HIT, _REFUSED = map(int, (BlockState.GRANTED, BlockState.HIT, BlockState.REFUSED))

PRIORITIES = {
    "low": int(lib.BL_LEVEL_LOW),
    "normal": int(lib.BL_LEVEL_NORMAL),
    "high": int(lib.BL_LEVEL_HIGH),
}
"""The priorities of hints, with the levels that the server uses."""

_TTL_MAX_S = 30 * 86400

_NAP_S = 0.0001
_NAP_MAX_S = 0.005
# The next pause, as a fraction of the time waited so far: the bound of the excess wait
_NAP_SHARE = 0.125


@dataclasses.dataclass(slots=True)  # not frozen, because freezing costs a call for each field
class PutResult:
    """The result of a put for each block, as arrays of shape (count,).

    ``states`` is GRANTED (this call stored the block), HIT (the pool already had it), PENDING
    (another session is writing it) or REFUSED. ``statuses`` is a negative error for each refused
    block. ``largest_bytes`` is the size of the call's largest block, and ``space_bytes`` the pool's
    space for blocks.
    """

    states: NDArray[np.uint8]
    statuses: NDArray[np.int32]
    largest_bytes: int = 0
    space_bytes: int = 0

    def _count(self, state: int) -> int:
        return self.states.tobytes().count(state)  # ten times as fast as numpy for a few blocks

    @property
    def stored(self) -> int:
        """The number of blocks that this call wrote."""
        return self._count(BlockState.GRANTED)

    @property
    def present(self) -> int:
        """The number of blocks that the pool already had."""
        return self._count(BlockState.HIT)

    @property
    def pending(self) -> int:
        """The number of blocks that another session is writing."""
        return self._count(BlockState.PENDING)

    @property
    def refused(self) -> int:
        """The number of blocks that were not stored."""
        return self._count(BlockState.REFUSED)

    def raise_for_refused(self) -> None:
        """Raise the error of the first refused block, if any."""
        for code in self.statuses[self.states == BlockState.REFUSED]:
            doing = "storing a block"
            if code == -lib.BL_ERROR_TOO_LARGE:
                doing += (
                    f" of {self.largest_bytes} bytes and its checksums in a pool of "
                    f"{self.space_bytes} bytes"
                )
            raise_for_status(int(code), doing)
            raise CacheError(
                "the server refused a block with no error code: client and server versions differ"
            )


@dataclasses.dataclass(slots=True)
class GetResult:
    """The result of a get: the first ``hits`` blocks were copied and checked.

    The targets of later blocks are undefined. ``states`` has the state of each block, shape
    (count,). ``mismatches`` counts blocks whose bytes or entry differed from the committed ones.
    Each was read again; if that failed, too, it is a miss. A miss caused by a takeover does not
    count as a mismatch.
    """

    hits: int
    states: NDArray[np.uint8]
    mismatches: int


@dataclasses.dataclass(frozen=True, slots=True)
class HintResult:
    """The number of blocks that got a hint, of blocks refused beyond a budget, of keys that the
    pool does not have, and of leading blocks that the pool has or is fetching from lower tiers.
    """

    given: int
    refused: int
    absent: int
    fetched: int


THREADS_MAX = (1 << 31) - 1  # of C; a copy uses at most one for each chunk


class LookupResult(int):
    """The number of leading blocks that some tier has.

    ``tiers`` is the fastest tier of each block, shape (count,): 0 is none, 1 is the pool, and n + 1
    is lower tier n, in the order in which the server was given them. A remote store is only queried
    when a block is fetched, so its blocks may be 0 here.
    """

    tiers: NDArray[np.uint8]

    def __new__(cls, tiers: NDArray[np.uint8]) -> LookupResult:
        """Count the leading blocks."""
        absent = tiers.tobytes().find(0)
        result = super().__new__(cls, len(tiers) if absent < 0 else absent)
        result.tiers = tiers
        return result


class KVCache(OfThisProcess):
    """KV blocks of one namespace in a pool.

    Caches with different values of ``namespace`` never share blocks, nor do those with different
    values of ``tenant``, which selects the share of the pool. With ``check_checksums``, every get
    compares the blocks' checksums (entries are always checked).

    ``engine``: the copy engine. ``auto`` (the CPU, and for large batches another engine that this
    process can open), an engine's name (:func:`beluga.transfer.engine_names`), or a
    :class:`~beluga.transfer.CopyEngine`. If the engine of ``auto`` fails, the CPU copies.
    Blocks may be in any memory that the engine can access, as a :class:`~beluga.kvcache.Run` of
    addresses. A get on the CPU copies with ``threads`` threads; a put uses one thread.

    ``link`` is a :class:`~beluga.transfer.Link`, one of its I/O handles, or the settings of this
    host's link to the pool. The link scheduler then throttles puts in the class ``write_class`` and
    gets in ``read_class``. None means no limit.

    With ``onboard``, a get waits for blocks that only a lower tier has (``beluga serve --disk``).

    ``kept`` blocks are never evicted. They are tasks of the queue :attr:`fingerprint`, and their
    number is limited (:class:`beluga.index.TaskClient`). Threads may share a cache: they copy in
    parallel, except by an ``engine``, which copies one batch at a time.

    Digests have 16 to 64 uniformly random bytes each, as engines compute them: a list of bytes or a
    uint8 array of shape (count, size). Folded keys are a uint64 array of shape (count, 2). Raises
    :class:`~beluga.errors.LayoutError` for chunks that are not whole lines, or for less than one
    thread.
    """

    def __init__(  # noqa: PLR0913  keyword-only but the first two
        self,
        pool_or_client: Pool | Client,
        *,
        namespace: Namespace | str | bytes,
        tenant: str = "",
        host: int | None = None,
        check_checksums: bool = True,
        chunk_size: int = CHUNK_SIZE,
        timeout_s: float = 5.0,
        engine: CopyEngine | str = "auto",
        threads: int = 1,
        link: Link | LinkSettings | IoHandle | None = None,
        read_class: TransferClass = TransferClass.ONBOARD,
        write_class: TransferClass = TransferClass.OFFLOAD,
        kept: bool = False,
        onboard: bool = True,
    ) -> None:
        of_type("namespace", namespace, Namespace, Mapping, str, bytes, int, np.integer)
        threads, chunk_size = whole("threads", threads), whole("chunk_size", chunk_size)
        if not 1 <= threads <= THREADS_MAX:
            raise LayoutError(f"threads is {threads}; give 1 to {THREADS_MAX}")
        if not 0 <= chunk_size <= BLOCK_SIZE_MAX or chunk_size % _LINE_SIZE:
            raise LayoutError(
                f"chunk_size is {chunk_size}; give a multiple of 64 up to {BLOCK_SIZE_MAX} bytes, "
                "or 0 for no checksums"
            )
        for name, kind in ("read_class", read_class), ("write_class", write_class):
            of_type(name, kind, TransferClass, int)
        read_class, write_class = TransferClass(read_class), TransferClass(write_class)
        if isinstance(pool_or_client, Client):
            self.client, self._own_client = pool_or_client, False
        else:
            self.client, self._own_client = (
                Client(pool_or_client, host=host, timeout_s=timeout_s),
                True,
            )
        self.namespace = Namespace.of(namespace).of_tenant(tenant)
        self._fingerprint = self.namespace.fingerprint
        self._check_checksums = check_checksums
        self._chunk_size = chunk_size
        self._timeout_ns = nanoseconds(timeout_s)
        self._index = IndexClient(self.client)
        devices = self.client.pool.data_devices
        self._flushes = any(device.coherence == "software" for device in devices)
        self._space_bytes = self.client.pool.geometry.stripe_count * int(lib.BL_STRIPE_SIZE)
        self._threads = threads
        self._onboards = onboard
        self._worker, self._moving = OpWorker(), threading.Lock()
        self._settings = CopySettings.default(self.client.pool).struct(self._threads)
        self._reserve_flags = int(lib.BL_RESERVE_KEPT) if kept else 0
        self._batches: list[core.bl_kv_batch] = []  # those that no thread uses
        self._read_class, self._write_class = read_class, write_class
        self.engine_fault: str | None = None
        """Why ``auto`` does not use its engine any more, or None."""
        try:
            self._open_engine(engine, link)
        except BaseException:
            self._end_session()
            raise
        leave_namespace(self.client.pool.runtime_dir, self.namespace)
        self.client.pool.before_close(self.close)  # before the engine closes

    def _open_engine(
        self, engine: CopyEngine | str, link: Link | LinkSettings | IoHandle | None
    ) -> None:
        """Choose the engine, and register with the link. Both hold for the life of this cache."""
        pool = self.client.pool
        self._choice = choose_engine(pool, engine, self._threads)
        self._own_link = host_link(pool, link) if isinstance(link, LinkSettings) else None
        shared = link if isinstance(link, Link) else self._own_link
        self._own_handle = None if shared is None else IoHandle(shared)
        self._handle = link if isinstance(link, IoHandle) else self._own_handle
        self._engine = self._choice.engine
        self._table: EngineTable | None = None
        if self._engine is not None and self._handle is not None:
            self._table = EngineTable(self._engine, self._handle.link.settings)
            # One piece may be admitted while the others are in flight
            self._handle.widen(max(self._table.piece_sizes), lib.BL_KV_IN_FLIGHT + 1)
        elif self._engine is not None:
            self._table = EngineTable(self._engine)

    def keys(self, digests: Digests) -> NDArray[np.uint64]:
        """Fold digests with the namespace: a uint64 array of shape (count, 2).

        Raises :class:`ValueError` for arrays of another shape.
        """
        if isinstance(digests, np.ndarray) and digests.dtype == np.uint64:
            if digests.ndim != 2 or digests.shape[1] != 2:
                raise BadValueError(f"keys have the shape {digests.shape}; give shape (count, 2)")
            return np.ascontiguousarray(digests)
        return fold(self.namespace, digests)

    @property
    def fingerprint(self) -> int:
        """The upper bits of the namespace's digest, stored in each of its entries."""
        return self._fingerprint

    def put(
        self, digests: Digests, sources: Blocks, *, names: NDArray[np.void] | None = None
    ) -> PutResult:
        """Store ``sources[i]`` under ``digests[i]``, unless the pool already has that block.

        ``names`` are the engine's names of the blocks, for subscribers of the pool's events: an
        array of :data:`beluga.index.NAME` of shape (count,), built by
        :func:`beluga.index.chain_names`. Blocks without a name are not announced.

        Raises :class:`~beluga.errors.LayoutError` for unusable memory, and
        :class:`~beluga.errors.RpcError`. A block for which there is no space is refused; that does
        not raise.
        """
        started = time.perf_counter()
        keys = self.keys(digests)
        count = len(keys)
        batch = runs(sources, count, writable=False)
        if names is not None:
            names = _rows("names", names, NAME, count)
        states, statuses = np.zeros(count, np.uint8), np.zeros(count, np.int32)
        largest = size = 0
        for run in batch:
            largest = max(largest, run.length)
            part = slice(run.start, run.start + run.count)
            of_run = keys[part], states[part], statuses[part]
            self._put_run(run, *of_run, None if names is None else names[part])
            size += of_run[1].tobytes().count(_GRANTED) * run.length
        count_of = states.tobytes().count
        stored, present, refused = count_of(_GRANTED), count_of(_HIT), count_of(_REFUSED)
        if self.client.report.put(stored, present, refused, size, started):
            self.client.send_report()
        return PutResult(states, statuses, largest, self._space_bytes)

    def get(
        self, digests: Digests, targets: Blocks, *, records: NDArray[np.void] | None = None
    ) -> GetResult:
        """Fetch the leading blocks that the pool has into ``targets``.

        ``records`` are the locations of blocks that another session has pinned
        (:meth:`beluga.index.Pins.records`): an array of :data:`beluga.index.BLOCK_RECORD` of shape
        (count,). The server is then called only for blocks that are no longer there.

        Raises :class:`~beluga.errors.LayoutError` and :class:`~beluga.errors.RpcError`.
        """
        started = time.perf_counter()
        keys = self.keys(digests)
        count = len(keys)
        batch = runs(targets, count, writable=True)
        if records is not None:
            records = _rows("records", records, BLOCK_RECORD, count)
        states = np.zeros(count, np.uint8)
        mismatches = ffi.new("uint64_t *")
        hits = size = 0
        for run in batch:
            part = slice(run.start, run.start + run.count)
            of_run, done = (keys[part], states[part]), 0
            if records is not None:
                # A later call to the server finds out what is wrong with the next block
                elsewhere = ffi.new("uint64_t *")
                done = self._get_run(run, *of_run, elsewhere, records[part])
            if done < run.count:
                done = self._get_rest(run, *of_run, mismatches, done)
            hits += done
            size += done * run.length
            if done < run.count:
                break
        flushed = size if self._flushes else 0
        if self.client.report.got(count, hits, size, flushed, started):
            self.client.send_report()
        return GetResult(hits, states, mismatches[0])

    def get_tokens(self, digests: Digests, tokens: ArrayLike, targets: Slots) -> GetResult:
        """Fetch single tokens of the leading blocks that the pool has.

        ``tokens`` has shape (count, 2): the index of a digest, and a token of that block. With a
        single digest, shape (count,) is also accepted: tokens of that block. ``targets`` are as
        many slots of an engine's layout, which must be the layout in which the blocks were stored.
        With ``check_checksums``, the chunks that contain the tokens are fetched whole and checked;
        without it only the tokens are fetched. Target rows of blocks that miss are undefined.
        Raises :class:`~beluga.errors.LayoutError`, :class:`~beluga.errors.RpcError`, and the errors
        of the engine.
        """
        started = time.perf_counter()
        of_type("targets", targets, Slots)
        keys, layout = self.keys(digests), targets.layout
        rows = targets.rows(tokens, len(keys))
        states = np.zeros(len(keys), dtype=np.uint8)
        mismatches = ffi.new("uint64_t *")
        run = Run(len(keys), layout.length, 0, np.empty((0, 2), np.uint64), list(layout.owners))
        hits = self._run(
            *(lib.bl_kv_get, self._read_class, run, keys),
            out=(ffi.from_buffer("uint8_t[]", states), mismatches),
            rows=rows.packed(),
            table=None if self._choice.spare else self._table,
        )
        if self.client.report.got(len(keys), hits, 0, 0, started):
            self.client.send_report()
        return GetResult(hits, states, mismatches[0])

    def lookup(self, digests: Digests) -> LookupResult:
        """Find the leading blocks that the pool or a lower tier has.

        Returns their number, with the tier of each block (:class:`LookupResult`). A get onboards
        blocks of lower tiers.
        """
        started = time.perf_counter()
        keys = self.keys(digests)
        hits = self._index.lookup(keys).count
        self._looked_up(started)
        tiers = np.ones(len(keys), np.uint8)
        if hits < len(keys):
            tiers[hits:] = fastest(self._index.tiers(keys[hits:]))
        return LookupResult(tiers)

    def onboard(self, digests: Digests, *, wait_s: float | None = None) -> int:
        """Start to onboard the leading blocks from lower tiers. Returns how many the pool has or
        will get.

        With ``wait_s``, wait for them until there is no progress for that many seconds, and return
        how many the pool has. Unlike :meth:`lookup`, this also finds blocks that only a remote
        store has.
        """
        keys = self.keys(digests)
        if wait_s is None:
            return self._index.onboard(keys)
        of_type("wait_s", wait_s, int, float, np.integer, np.floating)

        def look(done: int) -> tuple[int, BlockState]:
            lookup = self._index.lookup(keys[done:])
            return lookup.count, lookup.state

        begun = look(0)
        return follow(self._index, keys, begun, look, wait_s) if wait_s > 0 else begun[0]

    def prefetch(self, digests: Digests) -> int:
        """Like :meth:`onboard`, but with lower priority than blocks that a caller waits for."""
        return self._index.onboard(self.keys(digests), prefetch=True)

    def hint(
        self,
        digests: Digests,
        *,
        priority: str = "normal",
        ttl: float | None = None,
        pin: bool = False,
        prefetch: bool = False,
    ) -> HintResult:
        """Change the order of eviction, so that blocks are evicted earlier or later.

        ``priority`` is ``low`` (evicted before the tenant's other blocks), ``normal`` or ``high``
        (evicted after them). A block with ``pin`` is evicted only if nothing else makes room.
        ``ttl`` is the lifetime of the hint in seconds after the block's last use; after that the
        block is evicted first. With ``prefetch``, leading blocks that only lower tiers have are
        fetched (:meth:`prefetch`).

        A later hint replaces an earlier one. A hint ends with this session and with the server;
        ``normal`` without a ``ttl`` removes it. At most a quarter of the tenant's share may be high
        or pinned. The result counts refused hints and keys that the pool does not have.

        Raises BadTypeError, BadValueError and :class:`~beluga.errors.RpcError`.
        """
        level, ttl_ms = hint_level(priority, ttl, pin=pin)
        keys = self.keys(digests)
        fetched = self._index.onboard(keys, prefetch=True) if prefetch and len(keys) else 0
        given, refused = self._index.hint(keys, level=level, ttl_ms=ttl_ms)
        return HintResult(given, refused, len(keys) - given - refused, fetched)

    def pin(self, digests: Digests) -> Pins:
        """Pin the leading blocks that the pool has until :meth:`release`."""
        started = time.perf_counter()
        pins = self._index.pin(self.keys(digests))
        self._looked_up(started)
        return pins

    def release(self, pins: Pins) -> int:
        """Release pins and return how many were released.

        A second release of the same pins does nothing, and pins of a lost session are already gone.
        """
        return self._index.unpin(pins)

    def remove(self, digests: Digests) -> int:
        """Remove blocks from the pool and return how many it had."""
        return self._index.remove(self.keys(digests))

    def stat(self) -> IndexStat:
        """Return the server's counters of the block index."""
        return self._index.stat()

    @property
    def engine(self) -> CopyEngine | None:
        """The copy engine, or None if C copies everything by itself."""
        return self._engine

    def transfer_stats(self, *, own: bool = False) -> dict[TransferClass, TransferStats]:
        """Return the bytes and pieces that the link scheduler admitted for this cache and their
        waiting time, by class. If caches share an I/O handle, the counts are those of all of them;
        with ``own`` the result is then empty.
        """
        handle = self._own_handle if own else self._handle
        return {
            kind: TransferStats() if handle is None else handle.transfer_stats(kind)
            for kind in TransferClass
        }

    def close(self) -> None:
        """Wait for an interrupted batch. Then close the session, the I/O handle and the DSA if this
        cache opened them.
        """
        self._worker.close()
        self._end_session()
        if self._own_handle is not None:
            self._own_handle.close()
        if self._own_link is not None:
            self._own_link.close()
        if self._choice.made and self._choice.engine is not None:
            with self._moving:
                self._choice.engine.close()

    def _end_session(self) -> None:
        if self._own_client:
            self.client.close()

    def _looked_up(self, started: float) -> None:
        """Count a lookup and send a report if one is due."""
        if self.client.report.looked_up(started):
            self.client.send_report()

    def _put_run(
        self,
        run: Run,
        keys: NDArray[np.uint64],
        states: NDArray[np.uint8],
        statuses: NDArray[np.int32],
        names: NDArray[np.void] | None,
    ) -> None:
        out = ffi.from_buffer("uint8_t[]", states), ffi.from_buffer("int32_t[]", statuses)
        given = lib.bl_kv_put, self._write_class, run, keys
        if self._table is not None and run.count * run.length >= self._choice.write_bytes:
            try:
                self._run(*given, out=out, names=names, table=self._table)
            except TransferError as error:
                self._refuse_engine(error)
            else:
                return
        self._run(*given, out=out, names=names)

    def _get_run(
        self,
        run: Run,
        keys: NDArray[np.uint64],
        states: NDArray[np.uint8],
        mismatches: core.uint64_p,
        records: NDArray[np.void] | None = None,
    ) -> int:
        """Fetch the leading blocks of a run that the pool has. Returns their number. Blocks with
        ``records`` are fetched from there, without calling the server.
        """
        out = ffi.from_buffer("uint8_t[]", states), mismatches
        given = lib.bl_kv_get, self._read_class, run, keys
        if self._table is not None and run.count * run.length >= self._choice.read_bytes:
            try:
                return self._run(*given, out=out, records=records, table=self._table)
            except TransferError as error:
                self._refuse_engine(error)
        return self._run(*given, out=out, records=records)

    def _get_rest(
        self,
        run: Run,
        keys: NDArray[np.uint64],
        states: NDArray[np.uint8],
        mismatches: core.uint64_p,
        done: int,
    ) -> int:
        """Fetch the blocks of a run after the first ``done`` ones, including those in lower tiers.
        Returns how many of the run were fetched.

        The wait for a block ends after the cache's timeout without progress.
        """
        if done:
            run, keys, states = run.rest(done), keys[done:], states[done:]
        hits = self._get_run(run, keys, states, mismatches)
        if hits == run.count or not self._onboards:
            return done + hits

        def fetch(after: int) -> tuple[int, BlockState]:
            rest = run.rest(after), keys[after:], states[after:], mismatches
            count = self._get_run(*rest)
            return count, BlockState(states[min(after + count, run.count - 1)])

        begun = hits, BlockState(states[hits])
        return done + follow(self._index, keys, begun, fetch, self.client.timeout_s)

    def _run(  # noqa: PLR0913  keyword-only but the first four
        self,
        function: Callable[..., int],
        kind: TransferClass,
        run: Run,
        keys: NDArray[np.uint64],
        *,
        out: tuple[core.CData, core.CData],
        names: NDArray[np.void] | None = None,
        records: NDArray[np.void] | None = None,
        rows: NDArray[np.void] | None = None,
        table: EngineTable | None = None,
    ) -> int:
        """Move a run in C, by the engine of ``table``, or by the CPU as the link admits it. Returns
        the number of blocks.
        """
        session, handle = self.client.session, self._handle
        batch = self._batch(run, keys, kind, names=names, records=records, rows=rows)

        def move() -> int:
            if handle is None:
                return function(session, batch, *out)
            with handle.using() as io_queue:
                batch.io_queue = io_queue
                code = function(session, batch, *out)
                batch.io_queue = ffi.NULL
            handle.watch()
            return code

        owners = run, keys, names, records, rows
        if table is None:
            code = move()
        else:
            batch.engine = table.struct
            code = self._carry(table, batch, move, owners)
            batch.engine = batch.cancelled = ffi.NULL
        self._batches.append(batch)
        if code >= 0:
            return code
        if table is not None:
            table.raise_for_copy(code, owners)
        doing = "storing blocks" if function is lib.bl_kv_put else "fetching blocks"
        if code == -errno.ECANCELED:
            raise TransferCancelledError(f"{doing}: it was interrupted")
        return raise_for_status(code, doing)

    def _carry(
        self,
        table: EngineTable,
        batch: core.bl_kv_batch,
        move: Callable[[], int],
        owners: tuple[object, ...],
    ) -> int:
        """Run ``move`` with an engine where no interrupt can stop it, and return its result.
        Nothing of a cancelled put is published, because its memory may already be reused;
        ``owners`` exist until it has ended.
        """

        def carry(ticket: OpTicket[int]) -> int:
            batch.cancelled = ticket.flag
            if table.is_native:
                return move()
            with self._moving:
                table.begin(owners)
                code = move()
                table.end()
                return code

        # Signals do not interrupt other threads. A native engine, too, waits for a device, which
        # may hang: a second interrupt must end the caller's wait.
        main = threading.current_thread() is threading.main_thread()
        code = self._worker.run(carry) if main else carry(OpTicket(carry))
        if self._choice.spare and (fault := getattr(self._engine, "fault", None)) is not None:
            self._drop_engine(fault)
        return code

    def _refuse_engine(self, error: TransferError) -> None:
        """Drop the engine of ``auto`` after it failed and has stopped, so that C moves the batch.
        Raises the error if it is another engine, or not the engine's.
        """
        if not self._choice.spare or isinstance(error, _NOT_THE_ENGINE):
            raise error
        self._drop_engine(str(error))

    def _drop_engine(self, fault: str) -> None:
        if self._engine is not None:
            self._engine = self._table = None
            self.engine_fault = fault
            assert self._choice.engine is not None  # noqa: S101
            name = self._choice.engine.name
            _logger.warning("beluga: %s is disabled, the CPU copies: %s", name, fault)

    def _batch(  # noqa: PLR0913  keyword-only but the first three
        self,
        run: Run,
        keys: NDArray[np.uint64],
        kind: TransferClass,
        *,
        names: NDArray[np.void] | None,
        records: NDArray[np.void] | None,
        rows: NDArray[np.void] | None,
    ) -> core.bl_kv_batch:
        """Return a batch for C. The caller keeps the arrays alive, and returns the batch to
        ``_batches`` when C has used it.
        """
        batch = self._batches.pop() if self._batches else self._new_batch()
        batch.keys = ffi.from_buffer("uint64_t[]", keys)
        batch.fragments = ffi.from_buffer("bl_fragment[]", run.fragments)
        batch.names = ffi.NULL if names is None else ffi.from_buffer("bl_name[]", names)
        batch.records = (
            ffi.NULL if records is None else ffi.from_buffer("bl_block_record[]", records)
        )
        batch.rows = ffi.NULL if rows is None else ffi.from_buffer("bl_row[]", rows)
        batch.row_count = 0 if rows is None else len(rows)
        batch.count, batch.fragment_count, batch.length = run.count, run.fragment_count, run.length
        batch.transfer_class = kind
        return batch

    def _new_batch(self) -> core.bl_kv_batch:
        """Allocate a batch, with what is the same for all batches of this cache."""
        batch = ffi.new("bl_kv_batch *")
        batch.settings = self._settings
        batch.fingerprint, batch.timeout_ns = self._fingerprint, self._timeout_ns
        batch.chunk_size, batch.check_checksums = self._chunk_size, bool(self._check_checksums)
        batch.reserve_flags = self._reserve_flags
        return batch

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.namespace.digest.hex()[:8]} in {self.client.pool!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hint_level(priority: object, ttl: object, *, pin: object) -> tuple[int, int]:
    """Convert a hint to its level and its time in milliseconds. Raises BadTypeError and
    BadValueError.
    """
    of_type("priority", priority, str)
    of_type("pin", pin, bool)
    if priority not in PRIORITIES:
        raise BadValueError(
            f"the priority of a hint is {short(priority)}; give {', '.join(PRIORITIES)}"
        )
    if pin and priority == "low":
        raise BadValueError("a hint has both pin and low priority; give one of the two")
    milliseconds = 0
    if ttl is not None:
        of_type("ttl", ttl, int, float)
        if isinstance(ttl, bool) or not 0.001 <= ttl <= _TTL_MAX_S:  # type: ignore[operator]
            raise BadValueError(
                f"the ttl of a hint is {short(ttl)}; give seconds, from 0.001 to {_TTL_MAX_S}"
            )
        milliseconds = round(ttl * 1000)  # type: ignore[operator]
    return int(lib.BL_LEVEL_PINNED) if pin else PRIORITIES[str(priority)], milliseconds


def fastest(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert bit sets of tiers to the numbers of :class:`LookupResult`: the lowest bit plus 1."""
    lowest = bits & -bits
    return np.where(bits == 0, 0, np.log2(np.maximum(lowest, 1)) + 1).astype(np.uint8)


def follow(
    index: IndexClient,
    keys: NDArray[np.uint64],
    begun: tuple[int, BlockState],
    advance: Callable[[int], tuple[int, BlockState]],
    timeout_s: float,
) -> int:
    """Advance over the leading keys, and wait for blocks that are being fetched from lower tiers.

    ``advance(done)`` processes the blocks after the first ``done`` ones, as far as the pool has
    them. It returns their number and the state of the next block; ``begun`` is the result of the
    first such call. Returns how many blocks were processed in total. The wait ends after
    ``timeout_s`` seconds without progress.
    """
    done, state = begun
    since_s, has_requested = time.monotonic(), False
    while done < len(keys) and state.is_coming:
        waited_s = time.monotonic() - since_s
        if waited_s > timeout_s:
            break
        if state == BlockState.BELOW or not has_requested:  # the block may have been evicted again
            has_requested = True
            if not index.onboard(keys[done:]):
                break
        else:
            time.sleep(min(max(waited_s * _NAP_SHARE, _NAP_S), _NAP_MAX_S))
        count, state = advance(done)
        if count:
            done += count
            since_s, has_requested = time.monotonic(), False
    return done


def _rows(
    what: str, rows: NDArray[np.void], kind: np.dtype[np.void], count: int
) -> NDArray[np.void]:
    """Convert rows to the format of C. Raises LayoutError for other arrays."""
    if not isinstance(rows, np.ndarray) or rows.dtype != kind or rows.shape != (count,):
        raise LayoutError(
            f"{count} blocks need {count} {what}; give an array of beluga.index.{_ROWS[what]}"
        )
    return np.ascontiguousarray(rows)
