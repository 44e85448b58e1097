# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Remote tiers compared with the bare clients of their stores, on loopback: blocks loaded and saved
with the same number of threads, in interleaved pairs.

A tier creates and checks a header and a checksum for each block, and checks before a save whether
the store has it; the bare client only moves bytes. A folder is measured as its page cache has it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from beluga.errors import TierError
from beluga.tiers import BLOCK
from beluga.tiers.remote import RemoteSettings, open_remote

from ..harness.options import Options
from ..harness.ratio import race
from ..harness.row import Recorder, Row, copies, percentiles
from ..peers.redis_server import redis_server

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (128 * _KIB, 2560 * _KIB)
_BYTES = 128 * _MIB  # per measurement
_SINGLE_CALLS = 50

Bare = tuple[Callable[[str], Any], Callable[[str, memoryview], Any]]
"""How the bare client gets and puts an object."""


def bench_tiers_remote(options: Options) -> list[Row]:
    """Run the benchmark: a folder through obstore, and a redis-server of its own."""
    recorder = Recorder("tiers-remote", options, {"memory": "loopback", "crc": True})
    rows: list[Row] = []
    for name, opened in (("file", _folder), ("redis", _redis)):
        with ExitStack() as stack:
            try:
                url, bare = stack.enter_context(opened())
            except (TierError, ImportError, FileNotFoundError) as error:
                rows.append(recorder.skipped("load", str(error), engine=name))
                continue
            for size in _SIZES[:1] if options.smoke else _SIZES:
                options.report(f"{name}, {size >> 10} KiB")
                rows += _measure(recorder, name, url, bare, size)
    return rows


@contextmanager
def _folder() -> Iterator[tuple[str, Bare]]:
    import obstore
    from obstore.store import LocalStore

    with tempfile.TemporaryDirectory(prefix="beluga-bench-", dir="/dev/shm") as folder:
        store = LocalStore(Path(folder))

        def get(name: str) -> Any:
            return obstore.get(store, name).bytes()

        def put(name: str, data: memoryview) -> Any:
            return obstore.put(store, name, data, use_multipart=False)

        yield f"file://{folder}", (get, put)


@contextmanager
def _redis() -> Iterator[tuple[str, Bare]]:
    import redis

    with redis_server() as (port, _), closing(redis.Redis("127.0.0.1", port)) as client:
        yield f"redis://127.0.0.1:{port}/0", (client.get, client.set)


def _measure(recorder: Recorder, name: str, url: str, bare: Bare, size: int) -> list[Row]:
    options = recorder.options
    get, put = bare
    count = (8 * _MIB if options.smoke else _BYTES) // size
    payload = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
    records = np.zeros(count, BLOCK)
    records["key"] = np.arange(2 * count, dtype=np.uint64).reshape(count, 2)
    records["length"] = size
    keys = np.ascontiguousarray(records["key"])
    names = [f"bare/{number}" for number in range(count)]
    settings = RemoteSettings(operation_s=10, load_s=60, save_s=60)
    with closing(open_remote(url, settings=settings)) as tier, ExitStack() as stack:
        loads, saves = tier.threads, tier.threads // 2
        loaders = stack.enter_context(ThreadPoolExecutor(loads))
        savers = stack.enter_context(ThreadPoolExecutor(saves))

        def save() -> float:
            tier.remove(keys)
            return _rate(count, lambda: int(np.count_nonzero(tier.save(records, payload))))

        def bare_save() -> float:
            data = [memoryview(row) for row in payload]
            return _rate(count, lambda: len(list(savers.map(put, names, data))))

        def load() -> float:
            return _rate(count, lambda: sum(block is not None for block in tier.load(keys)))

        def bare_load() -> float:
            return _rate(count, lambda: sum(len(data) == size for data in loaders.map(get, names)))

        rows = []
        for case, limit, ours, threads in (
            ("save", bare_save, save, saves),
            ("load", bare_load, load, loads),
        ):
            ratio = race(limit, ours, pair_count=options.pair_count, retry_count=0)
            if case == "save":
                tier.remove(keys)
            times = []
            for at in range(min(count, _SINGLE_CALLS)):
                part, before = slice(at, at + 1), time.perf_counter_ns()
                tier.save(records[part], payload[part]) if case == "save" else tier.load(keys[part])
                times.append(time.perf_counter_ns() - before)
            tier.save(records, payload)
            fields = {**percentiles(np.array(times, np.uint64)), **copies(ratio, size)}
            rows.append(recorder.row(case, engine=name, bytes=size, threads=threads, **fields))
    return rows


def _rate(count: int, once: Callable[[], int]) -> float:
    """Return how many blocks per second it does. Raises TierError if some are missing."""
    before = time.perf_counter()
    done = once()
    spent = time.perf_counter() - before
    if done != count:
        raise TierError(f"{count - done} of {count} blocks are missing")
    return count / spent
