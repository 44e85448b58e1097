# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure copies of blocks between an engine's scattered memory and the pool (the paper's Exp 9 and
10).

Dense blocks are gathered and scattered, and some tokens of some blocks are read, each compared with
the limit loop with the same number of threads. A map covers fragment sizes and counts. Peers,
written in usual Python, do the same work in the same run; their results also end in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from beluga._ffi import lib
from beluga.errors import EngineUnavailableError
from beluga.transfer import ENGINES, CopyEngine, CpuEngine, EngineEntry

from ..gpu.beside import gpu_beside
from ..gpu.copy import gpu_copy
from ..gpu.null import null_gpu_rows
from ..harness.drive import together
from ..harness.ground import coherence_of, ground
from ..harness.machine import cores, memory_of, pinned
from ..harness.options import Options
from ..harness.ratio import Ratio, race
from ..harness.row import Recorder, Row, copies, percentiles
from ..harness.scene import Runner, Scene, Work
from ..harness.tokens import MODELS, analysis, selection
from ..peers.copies import PEERS, Peer
from .bandwidth import thread_counts

FRAGMENT_COUNT = 128
DENSE = ((20 << 10, FRAGMENT_COUNT), (32 << 10, FRAGMENT_COUNT), (1280, 2048))
"""Fragments of the paper's block, of Qwen3-32B's, and single rows."""

CASES = ("gather_write", "scatter_read")
CHUNK_SIZE: int = lib.BL_CHUNK_SIZE
MAP_SIZES = tuple(1024 << (2 * step) for step in range(5))
MAP_COUNTS = (16, 128, 1024)
PEER_FRAGMENTS = ((20 << 10, FRAGMENT_COUNT), (1280, 2048))

_SPAN = 150 << 20
_SMOKE_SPAN = 12 << 20
_RUN_BYTES = 160 << 20  # per run: 20 to 40 ms
_SMOKE_RUN_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """The place and the recorder of rows."""

    scene: Scene
    recorder: Recorder

    @property
    def options(self) -> Options:
        """Return the options of the benchmark."""
        return self.recorder.options

    def count(self, work: Work) -> int:
        """Return the operations of a run."""
        size = _SMOKE_RUN_BYTES if self.options.smoke else _RUN_BYTES
        return max(2, size // work.size)


def bench_copy(options: Options) -> list[Row]:
    """Return the rows of every engine, then of the peers."""
    with ground(options, devices=1) as pool:
        fixed: Row = {"memory": memory_of(pool), "coherence": coherence_of(pool), "depth": 1}
        span = _SMOKE_SPAN if options.smoke else _SPAN
        setting = Setting(Scene(pool, span), Recorder("copy", options, fixed))
        rows = [row for entry in ENGINES.values() for row in rows_of(setting, entry)]
        rows += _peer_rows(setting)
    return rows + null_gpu_rows(options)


def cpu_rows(setting: Setting) -> list[Row]:
    """Return the rows of the CPU, with 1..N threads; the map has one."""
    pool, rows = setting.scene.pool, []
    for threads in thread_counts(setting.options):
        engine = CpuEngine(pool, threads=threads)
        if threads == 1:
            with pinned(cores()[0]):
                rows += engine_rows(setting, engine, 1) + map_rows(setting, engine)
        else:
            rows += engine_rows(setting, engine, threads)
    return rows


def rows_of(setting: Setting, entry: EngineEntry) -> list[Row]:
    """Return one engine's rows, or why there are none."""
    if entry.name in OWN:
        return OWN[entry.name](setting)
    try:
        engine = entry.open(setting.scene.pool, 1)
    except EngineUnavailableError as error:
        return [setting.recorder.skipped(case, str(error), engine=entry.name) for case in CASES]
    try:
        return engine_rows(setting, engine, 1)
    finally:
        engine.close()


def cuda_rows(setting: Setting) -> list[Row]:
    """Return the rows of a machine with a GPU."""
    pool = setting.scene.pool
    return gpu_copy(setting.recorder, pool) + gpu_beside(setting.recorder, pool)


OWN: dict[str, Callable[[Setting], list[Row]]] = {"cpu": cpu_rows, "cuda": cuda_rows}
"""The engines with separate rows; all others share the same ones."""


def engine_rows(setting: Setting, engine: CopyEngine, threads: int) -> list[Row]:
    """Return all cases of an engine that reaches this process's own memory."""
    rows = []
    for fragment, count in DENSE:
        for chunk_size in (0, CHUNK_SIZE):
            works = [setting.scene.dense(case, fragment, count, chunk_size) for case in CASES]
            _write(engine, works[0])
            _adopt(works[0], works[1])
            rows += [_row(setting, engine, work, threads) for work in works]
    for model in MODELS:
        tokens = [selection(turn, 1 << 16) for turn in range(50)]
        note = f"{model.name}, {model.row_count} rows per token; {analysis(tokens)}"
        work = setting.scene.sparse(model)
        rows.append(_row(setting, engine, work, threads, note))
    return rows


def map_rows(setting: Setting, engine: CopyEngine) -> list[Row]:
    """Return the rows of fragment sizes and counts, as many as there is space for."""
    rows = []
    shapes = [(size, count) for size in MAP_SIZES for count in MAP_COUNTS]
    for fragment, count in shapes[:2] if setting.options.smoke else shapes:
        for case in CASES:
            if 4 * fragment * count <= setting.scene.span:
                work = setting.scene.dense(case, fragment, count)
                rows.append(_row(setting, engine, work, 1, "map"))
    return rows


def _write(engine: CopyEngine, work: Work) -> None:
    """Write all blocks of a work. This computes their checksums."""
    for plan in work.plans:
        engine.gather_write(plan).wait()


def _adopt(written: Work, read: Work) -> None:
    """Return the checksums of what was written, for readers."""
    for from_plan, to_plan in zip(written.plans, read.plans, strict=True):
        if from_plan.checksums is not None and to_plan.checksums is not None:
            to_plan.checksums[:] = from_plan.checksums


def _row(
    setting: Setting, engine: CopyEngine, work: Work, threads: int, note: str | None = None
) -> Row:
    options, crc = setting.options, work.plans[0].checksums is not None
    options.report(
        f"copy {work.case}, {engine.name}, {work.fragment_count} x {work.fragment_size} bytes, "
        f"{threads} threads{', checksums' if crc else ''}"
    )
    runner, count = Runner(work.ours(engine), work.plans), setting.count(work)
    limits = work.limits(threads)

    def limit() -> float:
        if threads == 1:
            return limits[0].count(count)
        return together(limits, cores(), count * work.size / 10e9)

    ratio: Ratio = race(
        limit,
        lambda: runner.count(count),
        pair_count=options.pair_count,
        retry_count=options.retry_count,
    )
    return setting.recorder.row(
        work.case,
        engine=engine.name,
        crc=crc,
        fragment_bytes=work.fragment_size,
        fragments=work.fragment_count,
        bytes=work.size,
        threads=threads,
        note=note,
        **copies(ratio, work.size),
        **percentiles(runner.sample(count)),
    )


def _peer_rows(setting: Setting) -> list[Row]:
    """Return the rows of the peers: single-threaded Python code, compared with the CPU engine."""
    rows = []
    engine = CpuEngine(setting.scene.pool, threads=1)
    with pinned(cores()[0]):
        for fragment, count in PEER_FRAGMENTS:
            for case in CASES:
                work = setting.scene.dense(case, fragment, count)
                for peer in PEERS:
                    rows.append(_peer_row(setting, engine, work, peer))
    return rows


def _peer_row(setting: Setting, engine: CopyEngine, work: Work, peer: Peer) -> Row:
    fixed: Row = {
        "peer": peer.name,
        "crc": False,
        "fragment_bytes": work.fragment_size,
        "fragments": work.fragment_count,
        "bytes": work.size,
        "threads": 1,
    }
    if why := peer.missing():
        return setting.recorder.skipped(work.case, why, **fixed)
    setting.options.report(f"copy {work.case}, {peer.name}, rows of {work.fragment_size} bytes")
    theirs = Runner(*peer.make(setting.scene, work))
    ours, count = Runner(work.ours(engine), work.plans), setting.count(work)
    ratio = race(
        lambda: theirs.count(count),
        lambda: ours.count(count),
        pair_count=setting.options.pair_count,
        retry_count=setting.options.retry_count,
    )
    return setting.recorder.row(
        work.case,
        **fixed,
        ops_per_s=round(ratio.limit),
        gb_per_s=round(ratio.limit * work.size / 1e9, 4),
        ratio_to_peer=round(ratio.ratio, 3),
        **percentiles(theirs.sample(count)),
    )
