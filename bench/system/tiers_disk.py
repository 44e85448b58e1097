# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The disk tier compared with fio: blocks read and written in the same file, with the same size,
depth and engine, in interleaved pairs; and the rebuild of the index, compared with a plain read of
its bytes.

A load compares the checksum of every block, and a save computes it, writes the index and syncs; fio
moves bytes, and syncs where a save does. Both use large pages.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TierError
from beluga.tiers import BLOCK
from beluga.tiers.arena import Arena
from beluga.tiers.disk import DiskTier
from beluga.tiers.disk.file import PAGE, Owner
from beluga.tiers.disk.store import Store, StoreSettings, make_engine

from ..harness.options import Options
from ..harness.ratio import race
from ..harness.row import Recorder, Row, copies, percentiles
from .tiers_flood import flood_rows

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (128 * _KIB, _MIB, 2560 * _KIB, 4 * _MIB)
_FLOOD_SIZE = 2560 * _KIB
_DEPTHS = (1, 8, 32)
_ENGINES = {"uring": "io_uring", "threads": "psync"}  # ours and fio's
_CALL_BYTES = 128 * _MIB  # read by each load
_SAVE_BYTES = 512 * _MIB
_SAVE_CALL_BYTES = 32 * _MIB  # written by each save, as the service of the tiers does
_AFTER_READS_S = 1.1  # until earlier reads no longer delay writes (csrc/disk/disk.c)
_SINGLE_CALLS = 100
_REBUILD_COUNT = 1_000_000
_ENTRY = 64
# A virtual disk is twice as fast with large pages, which the tier's buffers have.
_HUGE_PAGES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
_NO_FIO = "fio is not installed; install it, on Debian with: apt-get install fio"


@dataclass(frozen=True, slots=True)
class _Case:
    size: int
    depth: int
    engine: str
    random: bool = False
    write: bool = False

    @property
    def name(self) -> str:
        if self.write:
            return "save"
        return "random read" if self.random else "sequential read"


def bench_tiers_disk(options: Options) -> list[Row]:
    """Run the benchmark, in a temporary folder inside ``options.disk``."""
    recorder = _recorder(options)
    if shutil.which("fio") is None:
        return [recorder.skipped("random read", _NO_FIO)]
    space = 64 * _MIB if options.smoke else 2048 * _MIB
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="beluga-bench-", dir=options.disk) as folder:
        for size in _SIZES[1:2] if options.smoke else _SIZES:
            path = Path(folder) / f"{size}"
            keys = _fill(path, space, size)
            for case in _cases(size, options):
                options.report(f"{case.name}, {size >> 10} KiB, depth {case.depth}, {case.engine}")
                measure = _save if case.write else _read
                rows.append(measure(recorder, path, space, keys, case))
            if size in (_FLOOD_SIZE, _SIZES[1] * options.smoke):
                rows += _flood(recorder, path, space, keys, size)
            shutil.rmtree(path)
        options.report("the rebuild of the index")
        rows.append(_rebuild(recorder, Path(folder) / "index"))
    return rows


def rebuild_row(options: Options) -> Row:
    """Measure the rebuild alone."""
    with tempfile.TemporaryDirectory(prefix="beluga-bench-", dir=options.disk) as folder:
        return _rebuild(_recorder(options), Path(folder) / "index")


def _recorder(options: Options) -> Recorder:
    return Recorder("tiers-disk", options, {"memory": "disk", "peer": "fio", "crc": True})


def _cases(size: int, options: Options) -> Iterator[_Case]:
    for engine in _ENGINES:
        for depth in _DEPTHS[1:2] if options.smoke else _DEPTHS:
            for random in (True, False):
                yield _Case(size, depth, engine, random)
    for engine in _ENGINES:
        for depth in _DEPTHS[1:2] if options.smoke else _DEPTHS[1:]:
            yield _Case(size, depth, engine, write=True)


def _fill(path: Path, space: int, size: int) -> NDArray[np.uint64]:
    """Fill a tier with blocks: their keys, in the order of the file."""
    count = (space - 16 * _MIB) // size
    records = np.zeros(count, BLOCK)
    records["key"] = np.arange(1, 2 * count + 1, dtype=np.uint64).reshape(-1, 2)
    records["length"] = size
    payload = np.random.default_rng(0).integers(0, 256, (16, size), dtype=np.uint8)
    tier = DiskTier(path, space, smallest_block=size)
    for first in range(0, count, len(payload)):
        part = records[first : first + len(payload)]
        tier.save(part, payload[: len(part)])
    present = tier.contains(np.ascontiguousarray(records["key"]))
    tier.close()
    return np.ascontiguousarray(records["key"][present])


def _read(recorder: Recorder, path: Path, space: int, keys: NDArray[np.uint64], case: _Case) -> Row:
    fields = {"bytes": case.size, "depth": case.depth, "engine": case.engine}
    try:
        tier = DiskTier(path, space, smallest_block=case.size, io=case.engine, depth=case.depth)
    except TierError as error:
        return recorder.skipped(case.name, str(error), **fields)
    rng = np.random.default_rng(case.size)

    def ours() -> float:
        wanted = rng.permutation(keys) if case.random else keys
        calls = np.array_split(wanted, max(1, len(wanted) * case.size // _CALL_BYTES))
        before = time.perf_counter()
        loaded = sum(block is not None for call in calls for block in tier.load(call))
        spent = time.perf_counter() - before
        if loaded != len(keys):
            raise TierError(f"{len(keys) - loaded} of {len(keys)} blocks are missing")
        return loaded / spent

    def limit() -> float:
        return _fio(path / "blocks", tier.data_offset, len(keys), case)

    with closing(tier):
        ratio = race(limit, ours, pair_count=recorder.options.pair_count, retry_count=0)
        alone = percentiles(_times(lambda: tier.load(rng.choice(keys, 1))))
    return recorder.row(case.name, **fields, **alone, **copies(ratio, case.size))


def _save(recorder: Recorder, path: Path, space: int, keys: NDArray[np.uint64], case: _Case) -> Row:
    """Measure saves of new blocks, into a file whose space is allocated."""
    fields = {"bytes": case.size, "depth": case.depth, "engine": case.engine}
    try:
        tier = DiskTier(path, space, smallest_block=case.size, io=case.engine, depth=case.depth)
    except TierError as error:
        return recorder.skipped(case.name, str(error), **fields)
    count = min(_SAVE_BYTES // case.size, len(keys))
    batch = max(1, _SAVE_CALL_BYTES // case.size)
    payload = Arena().take(batch * case.size).reshape(batch, case.size)  # in pages, as a service's
    payload[:] = np.random.default_rng(0).integers(0, 256, payload.shape, dtype=np.uint8)
    records = np.zeros(count, BLOCK)
    records["key"], records["length"] = keys[:count], case.size

    def ours() -> float:
        tier.remove(keys[:count])
        time.sleep(_AFTER_READS_S)
        saved, before = 0, time.perf_counter()
        for first in range(0, count, batch):
            part = records[first : first + batch]
            saved += int(np.count_nonzero(tier.save(part, payload[: len(part)])))
        spent = time.perf_counter() - before
        if saved != count:
            raise TierError(f"{count - saved} of {count} blocks were not saved")
        return count / spent

    def limit() -> float:
        tier.remove(keys[:count])  # fio has overwritten its bytes
        return _fio(path / "blocks", tier.data_offset, count, case)

    with closing(tier):
        ratio = race(limit, ours, pair_count=recorder.options.pair_count, retry_count=0)
        tier.remove(keys[:count])
        left = iter(range(count))

        def once() -> None:
            at = next(left)
            tier.save(records[at : at + 1], payload[:1])

        alone = percentiles(_times(once, min(count, _SINGLE_CALLS)))
        ours()  # so that all blocks are there again
    return recorder.row(case.name, **fields, **alone, **copies(ratio, case.size))


def _flood(
    recorder: Recorder, path: Path, space: int, keys: NDArray[np.uint64], size: int
) -> Iterator[Row]:
    """Measure loads during saves, with either engine."""
    for engine in _ENGINES:
        recorder.options.report(f"load beside saves, {size >> 10} KiB, {engine}")
        try:
            tier = DiskTier(path, space, smallest_block=size, io=engine)
        except TierError as error:
            yield recorder.skipped("load beside saves", str(error), bytes=size, engine=engine)
            continue
        with closing(tier):
            yield from flood_rows(recorder, tier, keys, size, engine)


def _times(once: Callable[[], object], count: int = _SINGLE_CALLS) -> NDArray[np.uint64]:
    """Return how long each call took."""
    times = []
    for _ in range(count):
        before = time.perf_counter_ns()
        once()
        times.append(time.perf_counter_ns() - before)
    return np.array(times, np.uint64)


def _rebuild(recorder: Recorder, path: Path) -> Row:
    """Measure opening a tier with many blocks, compared with reading its index. The blocks' bytes
    are not read, so none are written.
    """
    count = _REBUILD_COUNT // 50 if recorder.options.smoke else _REBUILD_COUNT
    space = count * (PAGE + 2 * _ENTRY) + 16 * _MIB
    rng = np.random.default_rng(0)
    settings = StoreSettings(path, space, Owner(), "lru", PAGE, 32, make_engine("auto"))
    with closing(Store(settings, Arena())) as store:
        for first in range(0, count, 1 << 16):
            records = np.zeros(min(1 << 16, count - first), BLOCK)
            records["key"] = rng.integers(0, 1 << 63, (len(records), 2), dtype=np.uint64)
            records["length"] = PAGE
            store.publish(store.reserve(records))
    case, times = _Case(_MIB, 32, "uring", random=False), list[int]()

    def ours() -> float:
        before = time.perf_counter()
        with closing(Store(settings, Arena())) as store:
            spent = time.perf_counter() - before
            times.append(int(spent * 1e9))
            if store.stat()["blocks"] != count:
                raise TierError(f"{count - store.stat()['blocks']} of {count} blocks are missing")
        return 1 / spent

    def limit() -> float:
        blocks = -(-count * _ENTRY // _MIB)
        return _fio(path / "blocks", PAGE, blocks, case) / blocks

    ratio = race(limit, ours, pair_count=recorder.options.pair_count, retry_count=0)
    ours_ms, limit_ms = 1e3 / ratio.ours, 1e3 / ratio.limit
    note = f"{count} entries in {ours_ms:.0f} ms; reading them takes fio {limit_ms:.0f} ms"
    fields = {**percentiles(np.array(times, np.uint64)), **copies(ratio, count * _ENTRY)}
    return recorder.row("index rebuild", note=note, **fields)


def _fio(file: Path, offset: int, count: int, case: _Case) -> float:
    """Return how many blocks fio reads or writes per second."""
    jobs = case.depth if case.engine == "threads" else 1
    job_size = count // jobs * case.size
    command = [
        "env",
        _HUGE_PAGES,
        "fio",
        "--name=read",
        f"--filename={file}",
        f"--rw={'write' if case.write else 'randread' if case.random else 'read'}",
        f"--ioengine={_ENGINES[case.engine]}",
        f"--iodepth={1 if jobs > 1 else case.depth}",
        f"--numjobs={jobs}",
        f"--bs={case.size}",
        f"--offset={offset}",
        f"--offset_increment={job_size}",
        f"--size={job_size}",
        f"--io_size={job_size}",
        "--direct=1",
        f"--iomem_align={2 * _MIB}",  # otherwise fio has half its speed
        "--thread",
        "--group_reporting",
        "--randrepeat=0",
        "--output-format=json",
    ]
    if case.write:
        calls = max(1, _SAVE_CALL_BYTES // case.size // jobs)
        command += [f"--fdatasync={calls}", "--end_fsync=1", "--refill_buffers=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    moved = json.loads(done.stdout)["jobs"][0]["write" if case.write else "read"]
    return float(moved["io_bytes"]) / (float(moved["runtime"]) / 1e3) / case.size
