# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of the block index: calls of 256 random keys in a pool that is full of blocks,
compared with a bare index of the same keys in C.

Calls are made from C to the server's thread, which has its own core. No bytes are moved. ``lookup``
finds present keys. ``reserve_commit`` stores new ones, for each of which the coldest block is
evicted; the bare index removes the same number of keys and inserts others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from beluga import Client, IndexServer
from beluga._ffi import core
from beluga._ffi import ffi as core_ffi
from beluga._ffi import lib as core_lib
from beluga.errors import BelugaError, NoRoomError, raise_for_status
from beluga.pool import STRIPE_SIZE, Pool, scratch_folder

from .. import _limit
from .._limit import ffi, lib
from ..harness.ground import coherence_of, pool_folder
from ..harness.lines import TIMEOUT_S
from ..harness.machine import cores, memory_of, pinned
from ..harness.options import SOFTWARE, Options
from ..harness.ratio import race
from ..harness.row import Recorder, Row, percentiles, shares

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)  # blocks
KEYS = 256  # keys per call

_SMOKE_SIZES = (1_000,)
_CALLS, _SMOKE_CALLS = 400, 20
_BLOCK_SIZE = 4096  # the minimum space of a block
_LENGTH = 64  # of a payload that is not written
# bytes per block: two lines in each half of the table; server and bare index
_MEMORY_PER_BLOCK = 2 * 2 * 64 + 400
_TIMEOUT_NS = TIMEOUT_S * 10**9

_RECORD = np.dtype(
    [
        *(("offset", "<u8"), ("generation", "<u8"), ("block", "<u4"), ("length", "<u4")),
        *(("state", "<u4"), ("status", "<i4")),
    ]
)
_COMMIT = np.dtype(
    [("key", "<u8", (2,)), ("generation", "<u8"), ("block", "<u4"), ("checksums_crc", "<u4")]
)

Keys = npt.NDArray[np.uint64]
Call = Callable[[Keys], int]
"""Returns the nanoseconds that it took."""


def bench_index(options: Options) -> list[Row]:
    """Return a row for lookups and one for stores for each number of blocks."""
    rows: list[Row] = []
    for size in _SMOKE_SIZES if options.smoke else SIZES:
        recorder = Recorder("index", options, {"threads": 1, "fragments": KEYS, "blocks": size})
        if len(cpus := cores()) < 2:
            rows.append(recorder.skipped("lookup", "needs two cores"))
            continue
        options.report(f"index, {size:,} blocks")
        try:
            with _pool(options, size) as pool, pinned(cpus[1]), IndexServer(pool), pinned(cpus[0]):
                rows += _measure(recorder, pool, size)
        except NoRoomError as error:
            rows.append(recorder.skipped("lookup", str(error)))
    return rows


@contextmanager
def _pool(options: Options, size: int) -> Iterator[Pool]:
    """Yield a pool of this number of blocks, in sparse files. Raises NoRoomError."""
    parent, room = pool_folder(needed := size * _MEMORY_PER_BLOCK)
    if room < needed:
        raise NoRoomError(f"{needed >> 20} MiB of memory are needed, but {room >> 20} MiB are free")
    device_size = -(-size * (_BLOCK_SIZE + _MEMORY_PER_BLOCK) // STRIPE_SIZE) * STRIPE_SIZE
    with (
        scratch_folder("bench", parent) as folder,
        Pool.create(
            [Path(folder) / "device"],
            device_size=device_size + (64 << 20),
            max_blocks=size,
            coherence=options.coherence or SOFTWARE,
            sparse=device_size > room,  # the blocks themselves are not written
        ) as pool,
    ):
        yield pool


def _measure(recorder: Recorder, pool: Pool, size: int) -> list[Row]:
    calls = _SMOKE_CALLS if recorder.options.smoke else _CALLS
    recorder.fixed.update(memory=memory_of(pool), coherence=coherence_of(pool))
    rng = np.random.default_rng(recorder.options.seed)
    keys = _new(rng, size)
    with Client(pool) as client, _Bare(keys) as bare:
        ours = _Ours(client.session)
        for first in range(0, size, KEYS):
            ours.store(keys[first : first + KEYS])

        def stored_keys() -> Keys:
            return np.ascontiguousarray(keys[rng.integers(0, size, calls * KEYS)])

        def fresh() -> Keys:
            return _new(rng, calls * KEYS)

        return [
            _row(recorder, "lookup", stored_keys, bare.walk, ours.lookup),
            _row(recorder, "reserve_commit", fresh, bare.replace, ours.store),
        ]


def _new(rng: np.random.Generator, count: int) -> Keys:
    return rng.integers(1, 1 << 63, (count, 2), dtype=np.uint64)


def _row(recorder: Recorder, case: str, keys: Callable[[], Keys], limit: Call, ours: Call) -> Row:
    """Compare calls with the limit, both by the median call of each run."""
    options = recorder.options
    ratio = race(
        lambda: _keys_per_s(_each(limit, keys())),
        lambda: _keys_per_s(_each(ours, keys())),
        pair_count=options.pair_count,
        retry_count=options.retry_count,
    )
    return recorder.row(
        case,
        keys_per_s=round(ratio.ours),
        ops_per_s=round(ratio.ours / KEYS),
        limit=round(ratio.limit),
        limit_unit="keys/s",
        **shares(ratio),
        **percentiles(_each(ours, keys())),
    )


class _Ours:
    """Calls of the index from C, through one session."""

    def __init__(self, session: core.bl_session) -> None:
        self._session = session
        self._granted, self._commit_records = np.zeros(KEYS, _RECORD), np.zeros(KEYS, _COMMIT)
        self._records = core_ffi.from_buffer("bl_block_record[]", self._granted)
        self._commits = core_ffi.from_buffer("bl_commit[]", self._commit_records)
        self._statuses = core_ffi.new("int32_t[]", KEYS)
        self._state = core_ffi.new("uint32_t *")
        self._what = core_ffi.new("bl_block_request *", {"length": _LENGTH})

    def lookup(self, keys: Keys) -> int:
        """Look up present keys. Returns the nanoseconds of the call."""
        words = core_ffi.from_buffer("uint64_t[]", keys)
        args = self._session, words, len(keys), 0, self._records, self._state, _TIMEOUT_NS
        start_ns = time.perf_counter_ns()
        hits = core_lib.bl_lookup(*args)
        taken_ns = time.perf_counter_ns() - start_ns
        if raise_for_status(hits, "looking blocks up") != len(keys):
            raise BelugaError(f"{hits} of {len(keys)} blocks were found")
        return taken_ns

    def store(self, keys: Keys) -> int:
        """Reserve and commit. Returns the nanoseconds of both calls."""
        words, count = core_ffi.from_buffer("uint64_t[]", keys), len(keys)
        reserving = self._session, words, count, self._what, self._records, _TIMEOUT_NS
        start_ns = time.perf_counter_ns()
        raise_for_status(core_lib.bl_reserve(*reserving), "reserving blocks")
        taken_ns = time.perf_counter_ns() - start_ns
        for name in ("generation", "block"):
            self._commit_records[name] = self._granted[name]
        self._commit_records["key"][:count] = keys
        committing = self._session, self._commits, count, self._statuses, _TIMEOUT_NS
        start_ns = time.perf_counter_ns()
        raise_for_status(core_lib.bl_commit_blocks(*committing), "committing blocks")
        taken_ns += time.perf_counter_ns() - start_ns
        raise_for_status(min(core_ffi.unpack(self._statuses, count)), "committing a block")
        return taken_ns


def _each(call: Call, keys: Keys) -> npt.NDArray[np.uint64]:
    """Return the nanoseconds of each call with a part of the keys."""
    parts = (keys[first : first + KEYS] for first in range(0, len(keys), KEYS))
    return np.array([call(part) for part in parts], np.uint64)


def _keys_per_s(taken_ns: npt.NDArray[np.uint64]) -> float:
    return KEYS * 1e9 / float(np.median(taken_ns))


class _Bare:
    """The bare index, with the same keys."""

    def __init__(self, keys: Keys) -> None:
        self._index = core_ffi.new("bl_hash **")
        raise_for_status(core_lib.bl_hash_create(self._index, len(keys)), "making an index")
        self._keys, self._oldest = keys.copy(), 0
        self._limit = ffi.new("limit_index *")
        self._limit.index = ffi.cast("void *", _address(self._index[0]))
        self._limit.prefetch = ffi.cast("limit_prefetch", _function("bl_hash_prefetch"))
        self._limit.find = ffi.cast("limit_find", _function("bl_hash_find"))
        self._limit.insert = ffi.cast("limit_insert", _function("bl_hash_add"))
        self._limit.remove = ffi.cast("limit_remove", _function("bl_hash_remove"))
        status = lib.limit_index_replace(self._limit, ffi.NULL, _words(keys), len(keys))
        raise_for_status(status, "adding keys")

    def walk(self, keys: Keys) -> int:
        """Find keys. Returns the nanoseconds."""
        start_ns = time.perf_counter_ns()
        hits = lib.limit_index_walk(self._limit, _words(keys), len(keys))
        taken_ns = time.perf_counter_ns() - start_ns
        if hits != len(keys):
            raise BelugaError(f"the bare index has {hits} of {len(keys)} keys")
        return taken_ns

    def replace(self, keys: Keys) -> int:
        """Replace the oldest keys by others. Returns the nanoseconds."""
        start = self._oldest if self._oldest + len(keys) <= len(self._keys) else 0
        old = self._keys[start : start + len(keys)].copy()
        start_ns = time.perf_counter_ns()
        status = lib.limit_index_replace(self._limit, _words(old), _words(keys), len(keys))
        taken_ns = time.perf_counter_ns() - start_ns
        raise_for_status(status, "replacing keys")
        self._keys[start : start + len(keys)] = keys
        self._oldest = start + len(keys)
        return taken_ns

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *_: object) -> None:
        core_lib.bl_hash_destroy(self._index[0])


def _function(name: str) -> int:
    return _address(core_ffi.addressof(core_lib, name))


def _address(pointer: core.CData) -> int:
    return int(core_ffi.cast("uintptr_t", pointer))


def _words(keys: Keys) -> _limit.uint64_p:
    return ffi.from_buffer("uint64_t[]", keys)
