# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Store and fetch KV blocks by key: one call into C moves a whole batch."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from beluga._ffi import core, ffi, lib
from beluga._shared import OfThisProcess
from beluga.arguments import count_of, of_type, whole
from beluga.errors import (
    BadValueError,
    CacheError,
    LayoutError,
    TransferCancelledError,
    raise_for_status,
)
from beluga.index import BLOCK_RECORD, NAME, BlockState, IndexClient
from beluga.kvcache.buffers import Run, runs
from beluga.kvcache.carry import EngineBatch
from beluga.kvcache.hints import HintResult, hint_level
from beluga.kvcache.keys import Namespace, fold
from beluga.kvcache.known import leave_namespace
from beluga.kvcache.onboarding import LookupResult, fastest, follow
from beluga.kvcache.uninterrupted import Uninterrupted
from beluga.rpc import Client, nanoseconds
from beluga.transfer import Direction, Selection, Slots, TransferClass, choose, tuned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

    from beluga.index import IndexStat, Pins
    from beluga.kvcache.buffers import Blocks
    from beluga.kvcache.uninterrupted import Left
    from beluga.pool import Pool
    from beluga.transfer import (
        CopyEngine,
        IoHandle,
        Link,
        LinkSettings,
        Plan,
        Slots,
        TransferStats,
    )

Digests: TypeAlias = "Sequence[bytes] | NDArray[np.uint8] | NDArray[np.uint64]"
"""The names of a batch: digests as bytes or packed into an array, or folded keys."""

_ROWS = {"names": "NAME", "records": "BLOCK_RECORD"}
CHUNK_SIZE: int = lib.BL_CHUNK_SIZE
_LINE_SIZE: int = lib.BL_LINE_SIZE
BLOCK_SIZE_MAX: int = lib.BL_BLOCK_SIZE_MAX


@dataclasses.dataclass(frozen=True, slots=True)
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


@dataclasses.dataclass(frozen=True, slots=True)
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


class KVCache(OfThisProcess):
    """KV blocks of one namespace in a pool.

    Caches with different values of ``namespace`` never share blocks, nor do those with different
    values of ``tenant``, which selects the share of the pool. With ``check_checksums``, every get
    compares the blocks' checksums (entries are always checked).

    ``engine``: the copy engine. ``auto`` (the CPU, or another engine where it is faster), an
    engine's name (:func:`beluga.transfer.engine_names`), or a :class:`~beluga.transfer.CopyEngine`.
    Blocks may be in any memory that the engine can access, as a :class:`~beluga.kvcache.Run` of
    addresses. A get on the CPU copies with ``threads`` threads; a put uses one thread.

    ``link`` is a :class:`~beluga.transfer.Link`, one of its I/O handles, or the settings of this
    host's link to the pool. The link scheduler then throttles puts in the class ``write_class`` and
    gets in ``read_class``. None means no limit.

    With ``onboard``, a get waits for blocks that only a lower tier has (``beluga serve --disk``).

    ``kept`` blocks are never evicted. They are tasks of the queue :attr:`fingerprint`, and their
    number is limited (:class:`beluga.index.TaskClient`). Like its :class:`~beluga.rpc.Client`, a
    cache may be used by one thread at a time.

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
        if threads < 1:
            raise LayoutError(f"threads is {threads}, but must be at least 1")
        if not 0 <= chunk_size <= BLOCK_SIZE_MAX or chunk_size % _LINE_SIZE:
            raise LayoutError(
                f"chunk_size is {chunk_size}; give a multiple of 64 up to {BLOCK_SIZE_MAX} bytes, "
                "or 0 for no checksums"
            )
        for name, one in ("read_class", read_class), ("write_class", write_class):
            of_type(name, one, TransferClass, int)
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
        self._settings: core.bl_copy_settings | None = None
        self._batches = Uninterrupted()
        self._batch = self._new_batch(kept=kept)
        self._read_class, self._write_class = read_class, write_class
        try:
            self._chosen = choose(self.client.pool, engine, threads)
            classes = read_class, write_class
            self._selection = Selection(
                self.client.pool, link, self._chosen, *classes, threads=threads
            )
        except BaseException:
            self._end_session()
            raise
        leave_namespace(self.client.pool.runtime_dir, self.namespace)
        self.client.pool.before_close(self.close)  # before the engine closes

    def keys(self, digests: Digests) -> NDArray[np.uint64]:
        """Fold digests with the namespace: a uint64 array of shape (count, 2).

        Raises :class:`ValueError` for arrays of another shape.
        """
        if isinstance(digests, np.ndarray) and digests.dtype == np.uint64:
            if digests.ndim != 2 or digests.shape[1] != 2:
                raise BadValueError(f"keys have the shape {digests.shape}; give shape (count, 2)")
            return np.ascontiguousarray(digests)
        return fold(self.namespace, cast("Sequence[bytes] | NDArray[np.uint8]", digests))

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
        keys = self._paired(digests, sources)
        name_rows = _rows("names", names, NAME, len(keys))
        states = np.zeros(len(keys), dtype=np.uint8)
        statuses = np.zeros(len(keys), dtype=np.int32)
        largest = size = 0
        for run in runs(sources, writable=False):
            _refuse_long(run)
            largest = max(largest, run.length)
            part = slice(run.start, run.start + run.count)
            raise_for_status(
                self._put(
                    run,
                    keys[part],
                    states[part],
                    statuses[part],
                    None if name_rows is None else name_rows[part],
                ),
                "storing blocks",
            )
            size += states[part].tobytes().count(BlockState.GRANTED) * run.length
        result = PutResult(states, statuses, largest, self._space_bytes)
        if self.client.report.put(result.stored, result.present, result.refused, size, started):
            self.client.send_report()
        return result

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
        keys = self._paired(digests, targets)
        where = _rows("records", records, BLOCK_RECORD, len(keys))
        states = np.zeros(len(keys), dtype=np.uint8)
        mismatches = ffi.new("uint64_t *")
        hits = size = 0
        for run in runs(targets, writable=True):
            _refuse_long(run)
            part = slice(run.start, run.start + run.count)
            found = 0
            if where is not None:
                found = self._get_there(run, keys[part], states[part], where[part])
            if found < run.count:
                rest = slice(run.start + found, run.start + run.count)
                found += self._get_all(run.rest(found), keys[rest], states[rest], mismatches)
            hits += found
            size += found * run.length
            if found < run.count:
                break
        self._got(len(keys), hits, size, started)
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
            self._carry(self._selection.token_engine, run, keys, fetch), "fetching tokens"
        )
        self._got(len(keys), found, 0, started)
        return GetResult(found, states, mismatches[0])

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
            found = self._index.lookup(keys[done:])
            return found.count, found.state

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
        return self._selection.engine

    def transfer_stats(self, *, own: bool = False) -> dict[TransferClass, TransferStats]:
        """Return the bytes and pieces that the link scheduler admitted for this cache and their
        waiting time, by class. If caches share an I/O handle, the counts are those of all of them;
        with ``own`` the result is then empty.
        """
        return self._selection.transfer_stats(own=own)

    def close(self) -> None:
        """Wait for an interrupted batch. Then close the session, the I/O handle and the DSA if this
        cache opened them.
        """
        self._batches.close()
        self._end_session()
        self._selection.close()
        self._chosen.close()

    def _end_session(self) -> None:
        if self._own_client:
            self.client.close()

    def _looked_up(self, started: float) -> None:
        """Count a lookup and send a report if one is due."""
        if self.client.report.looked_up(started):
            self.client.send_report()

    def _got(self, requested: int, hits: int, size: int, started: float) -> None:
        """Count a get of ``size`` bytes and send a report if one is due."""
        flushed = size if self._flushes else 0
        if self.client.report.got(requested, hits, size, flushed, started):
            self.client.send_report()

    def _paired(self, digests: Digests, blocks: Blocks) -> NDArray[np.uint64]:
        keys = self.keys(digests)
        count = count_of("a batch of blocks", blocks)
        if len(keys) != count:
            raise LayoutError(f"{len(keys)} keys but {count} blocks; give one key per block")
        return keys

    def _put(
        self,
        run: Run,
        keys: NDArray[np.uint64],
        states: NDArray[np.uint8],
        statuses: NDArray[np.int32],
        names: NDArray[np.void] | None,
    ) -> int:
        if (engine := self._engine_for(Direction.WRITE, run)) is not None:
            return self._carry(
                engine, run, keys, lambda carrier: carrier.put(run, states, statuses), names
            )
        self._tune()
        out = ffi.from_buffer("uint8_t[]", states), ffi.from_buffer("int32_t[]", statuses)
        with self._selection.using() as io_queue, self.client.lock:
            batch = self._filled(run, keys, self._write_class, io_queue, names)
            code = lib.bl_kv_put(self.client.session, batch, *out)
        return self._ended(code, "storing blocks")

    def _get(
        self,
        run: Run,
        keys: NDArray[np.uint64],
        states: NDArray[np.uint8],
        mismatches: core.uint64_p,
        records: NDArray[np.void] | None = None,
    ) -> int:
        if (engine := self._engine_for(Direction.READ, run)) is not None:
            return self._carry(
                engine,
                run,
                keys,
                lambda carrier: carrier.get(states, mismatches, carrier.blocks(run)),
                records=records,
            )
        self._tune()
        out = ffi.from_buffer("uint8_t[]", states)
        with self._selection.using() as io_queue, self.client.lock:
            batch = self._filled(run, keys, self._read_class, io_queue, records=records)
            code = lib.bl_kv_get(self.client.session, batch, out, mismatches)
        return self._ended(code, "fetching blocks")

    def _get_all(
        self,
        run: Run,
        keys: NDArray[np.uint64],
        states: NDArray[np.uint8],
        mismatches: core.uint64_p,
    ) -> int:
        """Fetch the leading blocks of a run, including those in lower tiers. Returns their number.

        The wait for a block ends after the cache's timeout without progress.
        """
        hits = raise_for_status(self._get(run, keys, states, mismatches), "fetching blocks")
        if hits == run.count or not self._onboards:
            return hits

        def fetch(done: int) -> tuple[int, BlockState]:
            rest = run.rest(done), keys[done:], states[done:], mismatches
            count = raise_for_status(self._get(*rest), "fetching blocks")
            return count, BlockState(states[min(done + count, run.count - 1)])

        begun = hits, BlockState(states[hits])
        return follow(self._index, keys, begun, fetch, self.client.timeout_s)

    def _get_there(
        self,
        run: Run,
        keys: NDArray[np.uint64],
        states: NDArray[np.uint8],
        records: NDArray[np.void],
    ) -> int:
        """Fetch leading blocks at the locations in ``records``, without calling the server. Returns
        their number. A later call to the server finds out what is wrong with the next block.
        """
        elsewhere = ffi.new("uint64_t *")
        code = self._get(run, keys, states, elsewhere, records)
        return raise_for_status(code, "fetching blocks")

    def _engine_for(self, direction: Direction, run: Run) -> CopyEngine | None:
        size, fragments = run.count * run.length, run.count * run.fragment_count
        return self._selection.engine_for(direction, size, fragments)

    def _ended(self, code: int, doing: str) -> int:
        self._selection.watch()
        if code == -errno.ECANCELED:
            raise TransferCancelledError(f"{doing}: it was interrupted")
        return int(code)

    def _carry(  # noqa: PLR0913  the last one is keyword-only
        self,
        engine: CopyEngine,
        run: Run,
        keys: NDArray[np.uint64],
        move: Callable[[EngineBatch], int],
        names: NDArray[np.void] | None = None,
        *,
        records: NDArray[np.void] | None = None,
    ) -> int:
        """Run ``move`` for a batch where no interrupt can stop it, and return its result."""

        def carry(left: Left) -> int:
            self._tune()
            with self.client.lock:
                # The engine throttles itself, so C gets no I/O queue.
                batch = self._filled(run, keys, self._read_class, ffi.NULL, names, records=records)
                session, pool_size = self.client.session, self.client.pool.geometry.size
                return move(EngineBatch(engine, session, batch, pool_size, left))

        return self._batches.run(carry)

    def _tune(self) -> None:
        """Load or measure the copy thresholds of C before the first copy."""
        if self._settings is None:
            self._settings = tuned(self.client.pool).struct(self._threads)
            self._batch.settings = self._settings

    def _new_batch(self, *, kept: bool) -> core.bl_kv_batch:
        """Allocate this cache's only batch. Each put or get fills it under the client's lock."""
        batch = ffi.new("bl_kv_batch *")
        batch.fingerprint, batch.timeout_ns = self._fingerprint, self._timeout_ns
        batch.chunk_size, batch.check_checksums = self._chunk_size, bool(self._check_checksums)
        batch.reserve_flags = lib.BL_RESERVE_KEPT if kept else 0
        return batch

    def _filled(  # noqa: PLR0913  the last one is keyword-only
        self,
        run: Run,
        keys: NDArray[np.uint64],
        kind: TransferClass,
        io_queue: core.bl_io_queue | core.Null,
        names: NDArray[np.void] | None = None,
        *,
        records: NDArray[np.void] | None = None,
    ) -> core.bl_kv_batch:
        """Fill the batch for C. The caller holds the client's lock and keeps the arrays alive."""
        batch = self._batch
        batch.keys = ffi.from_buffer("uint64_t[]", keys)
        batch.fragments = ffi.from_buffer("bl_fragment[]", run.fragments)
        batch.names = ffi.NULL if names is None else ffi.from_buffer("bl_name[]", names)
        batch.records = (
            ffi.NULL if records is None else ffi.from_buffer("bl_block_record[]", records)
        )
        batch.count, batch.fragment_count, batch.length = run.count, run.fragment_count, run.length
        batch.io_queue, batch.transfer_class = io_queue, kind
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rows(
    what: str, rows: NDArray[np.void] | None, kind: np.dtype[np.void], count: int
) -> NDArray[np.void] | None:
    """Convert rows to the format of C. Raises LayoutError for other arrays."""
    if rows is None:
        return None
    if not isinstance(rows, np.ndarray) or rows.dtype != kind or rows.shape != (count,):
        raise LayoutError(
            f"{count} blocks need {count} {what}; give an array of beluga.index.{_ROWS[what]}"
        )
    return np.ascontiguousarray(rows)


def _refuse_long(run: Run) -> None:
    if run.length > BLOCK_SIZE_MAX:
        raise LayoutError(
            f"a block has {run.length} bytes, but the pool takes up to {BLOCK_SIZE_MAX}"
        )
