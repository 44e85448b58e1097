# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs one schedule of a DSA's faults on the engine, and compares with slices of bytes. The library
may be _core, or a copy of it that is compiled with changed lines.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI
from hypothesis import strategies as st
from support.engines import Bytes, peek, poke
from support.plans import cut
from support.soft_dsa import soft_queue

from beluga import _build, coherence
from beluga._ffi import ffi
from beluga._ffi import ffi as core_ffi
from beluga._ffi import lib as core_lib
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import Plan, plan_blocks, plan_rows

# ---- Runs one schedule of a DSA's faults on the engine, and compares with slices of bytes.


CANARY = 253
WAIT_NS = 60 * 10**9


@dataclasses.dataclass(frozen=True)
class Library:
    """The C core, as cffi has it."""

    ffi: Any
    lib: Any

    def of(self, kind: str, pointer: Any) -> Any:
        """A pointer of ``_core`` with the type of this library."""
        return self.ffi.cast(kind, int(core_ffi.cast("uintptr_t", pointer)))

    def product(self, kind: str, pointer: Any) -> Any:
        """A pointer of this library with the type of ``_core``."""
        return core_ffi.cast(kind, int(self.ffi.cast("uintptr_t", pointer)))


PRODUCT = Library(core_ffi, core_lib)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The blocks to copy, the properties of the queue, and its faults."""

    seed: int
    sizes: tuple[int, ...]  # of a block's fragments
    block_count: int
    chunk_size: int
    part: int  # bytes of the parts in flight
    size_max: int
    batch_max: int
    depth: int
    flush: int  # enum bl_dsa_flush
    faults: dict[str, int]


CHANCES = (0, 0, 2000, 20_000, 50_000)  # of 65536


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    kinds = ("fault", "list_fault", "error", "reorder", "late")
    faults = {kind: draw(st.sampled_from(CHANCES)) for kind in kinds}
    faults["full"] = draw(st.sampled_from(CHANCES[:-1]))  # each one pauses
    return Schedule(
        seed=draw(st.integers(0, 2**32)),
        sizes=tuple(draw(st.lists(st.integers(1, 5000), min_size=1, max_size=12))),
        block_count=draw(st.integers(1, 4)),
        chunk_size=64 * draw(st.sampled_from([0, 1, 5, 16, 256])),
        part=draw(st.sampled_from([1, 3000, 10**6])),
        size_max=draw(st.sampled_from([64, 777, 4096, 2 << 20])),
        batch_max=draw(st.sampled_from([0, 2, 5, 32])),
        depth=draw(st.sampled_from([1, 3, 32])),
        flush=draw(st.integers(0, 2)),
        faults={**faults, "full_run": draw(st.integers(0, 30))},
    )


@contextmanager
def opened(library: Library, pool: Any, schedule: Schedule) -> Iterator[Any]:
    """An engine of this library on its software queue."""
    ffi, lib = library.ffi, library.lib
    limits = ffi.new(
        "bl_dsa_limits *", [schedule.size_max, schedule.batch_max, schedule.depth, 0, 0]
    )
    queue = soft_queue(limits, {"seed": schedule.seed, **schedule.faults}, core=library)
    rules = ffi.new("bl_dsa_rules *", [schedule.flush, schedule.flush, schedule.seed % 2, 0])
    engine = ffi.new("bl_dsa_engine **")
    assert lib.bl_dsa_engine_open(pool, queue, limits, rules, engine) == 0
    yield engine[0]
    lib.bl_dsa_engine_close(engine[0])


def run(library: Library, engine: Any, plan: Plan, part: int, *, is_read: bool) -> list[int]:
    """The statuses of the plan's parts, all of which are in flight."""
    ffi, lib = library.ffi, library.lib
    transfers, structs = [], []
    for piece in cut(plan, part):
        structs.append(piece.struct())
        out = ffi.new("bl_dsa_transfer **")
        struct = library.of("bl_plan *", structs[-1])
        assert lib.bl_dsa_start(engine, struct, is_read, out) == 0
        transfers.append(out[0])
    statuses = []
    for transfer in reversed(transfers):
        assert lib.bl_dsa_wait(engine, transfer, WAIT_NS) == 0
        statuses.append(lib.bl_dsa_status(transfer))
        lib.bl_dsa_free(transfer)
    return statuses


class WrongBytesError(AssertionError):
    """The bytes or the checksums differ from the oracle's."""


def demand(condition: object, what: str) -> None:
    if not condition:
        raise WrongBytesError(what)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Blocks near the end of the first data stripe, and their content."""

    schedule: Schedule
    pool: Pool
    content: Bytes  # blocks x fragments, a few bytes apart
    addresses: Any
    offsets: Any

    @classmethod
    def make(cls, schedule: Schedule, pool: Pool) -> Scene:
        rng = np.random.default_rng(schedule.seed)
        room = -(-sum(schedule.sizes) // 64) * 64
        start = pool.geometry.data_offset + STRIPE_SIZE - 64 * int(rng.integers(1, 60))
        offsets = (start + (room + 64) * np.arange(schedule.block_count)).astype(np.uint64)
        stride = np.array(schedule.sizes) + 3
        content = rng.integers(0, 256, int(stride.sum()) * schedule.block_count + 3, np.uint8)
        places = np.cumsum(np.tile(stride, schedule.block_count)) - np.tile(
            stride, schedule.block_count
        )
        return cls(schedule, pool, content, places.reshape(schedule.block_count, -1), offsets)

    @property
    def length(self) -> int:
        return sum(self.schedule.sizes)

    def plan(self, memory: Bytes) -> Plan:
        return plan_blocks(
            (self.addresses + memory.ctypes.data).astype(np.uint64),
            np.array(self.schedule.sizes),
            self.offsets,
            chunk_size=self.schedule.chunk_size,
        )

    def payload(self, block: int) -> Bytes:
        parts = zip(self.addresses[block].tolist(), self.schedule.sizes, strict=True)
        return np.concatenate([self.content[at : at + size] for at, size in parts])

    def sums(self) -> list[int]:
        chunk = self.schedule.chunk_size
        return [
            coherence.crc32c(self.payload(block)[at : at + chunk].tobytes())
            for block in range(self.schedule.block_count)
            for at in range(0, self.length, chunk)
        ]


def play(library: Library, pool_handle: Any, pool: Pool, schedule: Schedule) -> None:
    """Write, read, and read some rows. Raises :class:`WrongBytesError`."""
    scene = Scene.make(schedule, pool)
    area = (
        int(scene.offsets[0]) - 64,
        64 + (int(scene.offsets[-1] - scene.offsets[0]) + -(-scene.length // 64) * 64 + 64),
    )
    poke(pool, area[0], np.full(area[1], CANARY, np.uint8))
    stored = np.full(area[1], CANARY, np.uint8)
    for block, offset in enumerate(scene.offsets.tolist()):
        at = offset - area[0]
        stored[at : at + -(-scene.length // 64) * 64] = 0
        stored[at : at + scene.length] = scene.payload(block)
    with opened(library, pool_handle, schedule) as engine:
        before = scene.content.copy()
        plan = scene.plan(scene.content)
        statuses = run(library, engine, plan, schedule.part, is_read=False)
        demand(not any(statuses), f"writing failed: {statuses}")
        demand(np.array_equal(peek(pool, *area), stored), "other bytes in the pool")
        demand(np.array_equal(scene.content, before), "the source was changed")
        if schedule.chunk_size:
            demand(plan.checksums.tolist() == scene.sums(), "other checksums")
        target = np.full(len(scene.content), CANARY, np.uint8)
        wanted = target.copy()
        for row in scene.addresses:
            for at, size in zip(row.tolist(), schedule.sizes, strict=True):
                wanted[at : at + size] = scene.content[at : at + size]
        back = dataclasses.replace(scene.plan(target), checksums=plan.checksums)
        statuses = run(library, engine, back, schedule.part, is_read=True)
        demand(not any(statuses), f"reading failed: {statuses}")
        demand(np.array_equal(target, wanted), "other bytes were read")
        play_rows(library, engine, scene, plan)
        demand(np.array_equal(peek(pool, *area), stored), "reading changed the pool")


def play_rows(library: Library, engine: Any, scene: Scene, plan: Plan) -> None:
    rng = np.random.default_rng(scene.schedule.seed + 1)
    count = int(rng.integers(1, 12))
    sizes = rng.integers(1, min(scene.length, 700) + 1, count)
    starts = np.array([rng.integers(0, scene.length - size + 1) for size in sizes])
    blocks = rng.integers(0, scene.schedule.block_count, count)
    places = np.cumsum(sizes + 3) - sizes
    target = np.full(int(places[-1] + sizes[-1]) + 3, CANARY, np.uint8)
    wanted = target.copy()
    for block, start, size, place in zip(blocks, starts, sizes, places, strict=True):
        wanted[place : place + size] = scene.payload(block)[start : start + size]
    sums = None
    if plan.checksums is not None:
        sums = plan.checksums.reshape(scene.schedule.block_count, -1)
    rows = plan_rows(
        (places + target.ctypes.data).astype(np.uint64),
        blocks,
        starts,
        sizes,
        offsets=scene.offsets,
        length=scene.length,
        chunk_size=scene.schedule.chunk_size,
        checksums=sums,
    )
    statuses = run(library, engine, rows, scene.schedule.part, is_read=True)
    demand(not any(statuses), f"reading rows failed: {statuses}")
    demand(np.array_equal(target, wanted), "other bytes in rows")


# ---- Compiles the C core with changed lines: with a planted bug, or with a record of its
# operations.


GCC = shutil.which("gcc") or ""


def built(folder: Path, changes: Iterable[tuple[str, str, str]], more: str = "") -> Library:
    """Build the core with ``changes``: a file, a line that occurs once, and its replacement.

    ``more`` has declarations besides those of the product.
    """
    source = folder / "csrc"
    shutil.copytree(_build.CSRC, source)
    for file, line, becomes in changes:
        text = (source / file).read_text()
        assert text.count(line) == 1, f"{file} does not have {line!r} exactly once"
        (source / file).write_text(text.replace(line, becomes))
    target = folder / "changed.so"
    define = f"-DBL_FORMAT_HASH=0x{_build.format_hash():016x}ull"
    flags = ["-std=gnu11", "-O0", "-w", "-shared", "-fPIC", "-pthread", define, f"-I{source}"]
    subprocess.run([GCC, *flags, str(source / "beluga.c"), "-o", str(target)], check=True)
    own = FFI()
    own.cdef(_build.cdef((*_build.CORE_HEADERS, *_build.DSA_HEADERS)) + more)
    return Library(own, own.dlopen(str(target)))


@contextmanager
def opened_pool(library: Library, pool: Pool) -> Iterator[Any]:
    """The ``bl_pool *`` of ``_core``, with the type of this library."""
    handle = library.ffi.new("bl_pool **")
    mapping = pool._mapping
    devices = library.of("void *const *", ffi.cast("void **", mapping.addresses))
    superblocks = library.of("bl_superblock *", mapping.superblocks)
    assert library.lib.bl_pool_open(superblocks, devices, handle) == 0
    yield handle[0]
    library.lib.bl_pool_close(handle[0])
