# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The right cache maintenance runs around a DSA's copies, for each range and at the right time.

On a test machine all caches are coherent, and a missing flush changes no byte. So the C core is
compiled again with a record of every rule of ``csrc/transfer/device_range.h`` and every submission.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dsa_schedule import GCC, Library, Schedule, built, opened_pool, run
from dsa_schedule import Scene as DsaScene
from support.plans import cut
from support.soft_dsa import soft_queue

from beluga._ffi import lib
from beluga.pool import Pool
from beluga.transfer import Plan, plan_blocks, plan_rows

pytestmark = pytest.mark.skipif(not GCC, reason="needs gcc")

READS, WRITTEN, ORDERED, SUBMIT, LANDED = "reads", "written", "ordered", "submit", "landed"
KINDS = (READS, WRITTEN, ORDERED, SUBMIT, LANDED)

NOTES = """
extern uint64_t bl_notes[65536][3];
extern uint32_t bl_note_count;
"""
# A record: its kind, and two numbers.
NOTE = """
uint64_t bl_notes[65536][3];
uint32_t bl_note_count;
static inline void bl_note(uint64_t kind, uint64_t first, uint64_t second)
{
    uint64_t *note = bl_notes[__atomic_fetch_add(&bl_note_count, 1, __ATOMIC_RELAXED) % 65536];
    note[0] = kind, note[1] = first, note[2] = second;
}
"""


def noted(signature: str, kind: str, first: str, second: str) -> tuple[str, str, str]:
    call = f"\n    bl_note({KINDS.index(kind)}, {first}, {second});"
    return "transfer/device_range.h", signature, signature + call


RULE = (
    "static inline void bl_device_{}(const bl_memory *memory, uint64_t offset, uint64_t size)\n{{"
)
CHANGES = [
    (
        "transfer/device_range.h",
        '#include "coherence/coherence.h"\n',
        '#include "coherence/coherence.h"\n' + NOTE,
    ),
    noted(RULE.format("reads"), READS, "offset", "size"),
    noted(RULE.format("written"), WRITTEN, "offset", "size"),
    noted("static inline void bl_device_ordered(const bl_memory *memory)\n{", ORDERED, "0", "0"),
    (
        "dsa/engine.c",
        "        engine->stat.descriptors += group->count;",
        "        engine->stat.descriptors += group->count;\n"
        f"        bl_note({KINDS.index(SUBMIT)}, group->list[0].flags_opcode,\n"
        "                group->list[0].size);",
    ),
    (
        "dsa/engine.c",
        "    bl_dsa_queue_ended(engine->queue);",
        f"    bl_dsa_queue_ended(engine->queue);\n    bl_note({KINDS.index(LANDED)}, 0, 0);",
    ),
]


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A core that records its acts, and its handle of the pool."""

    library: Library
    pool: Any

    def notes(self) -> list[tuple[str, int, int]]:
        """Return the records since the last call."""
        lib = self.library.lib
        assert lib.bl_note_count <= 65536
        found = [tuple(lib.bl_notes[i]) for i in range(lib.bl_note_count)]
        lib.bl_note_count = 0
        return [(KINDS[kind], first, second) for kind, first, second in found]


@pytest.fixture(scope="module")
def recorder(long_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    library = built(tmp_path_factory.mktemp("noted"), CHANGES, NOTES)
    with opened_pool(library, long_pool) as handle:
        yield Recorder(library, handle)


# One descriptor at a time: chunks of 1024, the last of which ends within a line.
SCHEDULE = Schedule(
    seed=2,
    sizes=(1500, 900),
    block_count=2,
    chunk_size=1024,
    part=10**6,
    size_max=4096,
    batch_max=0,
    depth=1,
    flush=lib.BL_DSA_FLUSH_CPU,
    faults={},
)


def moved(
    recorder: Recorder, pool: Pool, *, after: int, before: int, polls: bool = False, cache: int = 0
) -> tuple[Plan, list[Any], list[Any]]:
    """Write and read back. Returns the plan, and the records of both copies."""
    library = recorder.library
    ffi, core = library.ffi, library.lib
    scene = DsaScene.make(SCHEDULE, pool)
    limits = ffi.new("bl_dsa_limits *", [SCHEDULE.size_max, 0, SCHEDULE.depth, 0, 0])
    rules = ffi.new("bl_dsa_rules *", [after, before, cache, 0])
    queue = soft_queue(limits, pool=recorder.pool, core=library)
    engine = ffi.new("bl_dsa_engine **")
    assert core.bl_dsa_engine_open(recorder.pool, queue, limits, rules, engine) == 0
    recorder.notes()
    plan, found = scene.plan(scene.content), []
    for is_read in (False, True):
        if polls:
            struct, out = plan.struct(), ffi.new("bl_dsa_transfer **")
            plan_struct = library.of("bl_plan *", struct)
            assert core.bl_dsa_start(engine[0], plan_struct, is_read, out) == 0
            while not core.bl_dsa_ended(out[0]):
                core.bl_dsa_poll(engine[0])
            assert core.bl_dsa_status(out[0]) == 0
            core.bl_dsa_free(out[0])
        else:
            assert run(library, engine[0], plan, 10**9, is_read=is_read) == [0]
        found.append(recorder.notes())
    core.bl_dsa_engine_close(engine[0])
    return plan, found[0], found[1]


def ranges(plan: Plan) -> list[tuple[int, int]]:
    return [(int(chunk["offset"]), int(chunk["length"])) for chunk in plan.chunks]


def only(notes: list[Any], kind: str) -> list[tuple[int, int]]:
    return [(first, second) for what, first, second in notes if what == kind]


@pytest.mark.parametrize("polls", [False, True], ids=["waits", "polls"])
def test_written_lines_are_flushed_afterward_in_order(
    recorder: Recorder, long_pool: Pool, *, polls: bool
) -> None:
    plan, wrote, _ = moved(recorder, long_pool, after=lib.BL_DSA_FLUSH_CPU, before=0, polls=polls)
    assert only(wrote, WRITTEN) == ranges(plan)
    out = 0
    for kind, _, _ in wrote:
        out += {SUBMIT: 1, LANDED: -1}.get(kind, 0)
        assert kind != WRITTEN or out == 0, "flushed before its completion was seen"
    assert [kind for kind, _, _ in wrote][-1] == ORDERED
    assert only(wrote, READS) == []


@pytest.mark.parametrize("polls", [False, True], ids=["waits", "polls"])
def test_where_nothing_is_flushed_a_write_still_ends_with_a_fence(
    recorder: Recorder, long_pool: Pool, *, polls: bool
) -> None:
    """A caller may publish once poll() reports the end of the write."""
    _, wrote, _ = moved(recorder, long_pool, after=0, before=0, polls=polls)
    assert only(wrote, WRITTEN) == []
    kinds = [kind for kind, _, _ in wrote]
    assert kinds.index(ORDERED) > max(i for i, kind in enumerate(kinds) if kind == LANDED)


def test_cached_lines_are_dropped_before_the_device_reads(
    recorder: Recorder, long_pool: Pool
) -> None:
    plan, wrote, read = moved(recorder, long_pool, after=0, before=lib.BL_DSA_FLUSH_CPU)
    assert only(wrote, READS) == []
    assert only(read, READS) == ranges(plan)
    assert only(read, WRITTEN) == []
    dropped = 0
    for kind, _, _ in read:
        dropped += kind == READS
        assert kind != SUBMIT or dropped > 0
    first = [kind for kind, _, _ in read].index(READS)
    assert [kind for kind, _, _ in read[first:]][:3] == [READS, SUBMIT, LANDED]


def submitted_bytes(notes: list[Any]) -> dict[tuple[int, int], int]:
    """Return the submitted bytes of each opcode, with cache control and without."""
    found: dict[tuple[int, int], int] = {}
    for word, size in only(notes, SUBMIT):
        key = (word >> 24, int(word & lib.BL_DSA_CC > 0))
        found[key] = found.get(key, 0) + size
    return found


@pytest.mark.parametrize("cache", [0, 1], ids=["to-memory", "to-cache"])
def test_cache_control_is_as_configured_and_the_device_flushes_without_it(
    recorder: Recorder, long_pool: Pool, cache: int
) -> None:
    """A flush with cache control keeps lines, so this host's next reader would get stale bytes."""
    device = lib.BL_DSA_FLUSH_DEVICE
    _, wrote, read = moved(recorder, long_pool, after=device, before=device, cache=cache)
    size = sum(SCHEDULE.sizes) * SCHEDULE.block_count
    blank = -sum(SCHEDULE.sizes) % 64 * SCHEDULE.block_count
    flush, copy = (lib.BL_DSA_CFLUSH, 0), lib.BL_DSA_COPY_CRC
    assert submitted_bytes(wrote) == {
        (copy, cache): size,
        (lib.BL_DSA_FILL, cache): blank,
        flush: size,
    }
    assert submitted_bytes(read) == {(copy, 1): size, flush: size}
    assert only(read, SUBMIT)[0][0] >> 24 == lib.BL_DSA_CFLUSH
    assert only(wrote, SUBMIT)[-1][0] >> 24 == lib.BL_DSA_CFLUSH
    assert only(wrote, WRITTEN) == only(read, READS) == []


def lines_of(found: list[tuple[int, int]]) -> list[int]:
    """Return every line of these ranges, once for each range that has it."""
    return sorted(
        line for offset, size in found for line in range(offset // 64, -(-(offset + size) // 64))
    )


def plans(pool: Pool) -> list[tuple[Plan, int]]:
    """Return plans, and the smallest number of ranges that have exactly their lines."""
    start = pool.geometry.data_offset + 4096
    offsets = np.array([start, start + 5056, start + 8192, start + 2048 * 64], np.uint64)
    address = np.full((4, 1), 1 << 20, np.uint64)
    blocks = plan_blocks(address, np.array([5000]), offsets, chunk_size=1024)
    where = {"offsets": offsets, "length": 5000, "chunk_size": 1024}
    rows = plan_rows(
        np.full(4, 1 << 20, np.uint64),
        np.array([0, 0, 2, 0]),
        np.array([3, 60, 100, 70]),
        np.array([50, 10, 1, 1]),
        **where,  # type: ignore[arg-type]
    )
    summed = plan_rows(
        np.full(3, 1 << 20, np.uint64),
        np.array([0, 0, 3]),
        np.array([3, 1060, 4999]),
        np.array([50, 10, 1]),
        **where,  # type: ignore[arg-type]
        checksums=np.zeros((4, 5), np.uint32),
    )
    backward = dataclasses.replace(blocks, chunks=blocks.chunks[::-1].copy())
    return [(blocks, 3), *((part, 1) for part in cut(blocks, 1024)), (rows, 3), (summed, 2),
            (backward, len(blocks.chunks))]  # fmt: skip


def planned(plan: Plan) -> list[tuple[int, int]]:
    table = plan.pieces if plan.sparse and plan.checksums is None else plan.chunks
    return [(int(entry["offset"]), int(entry["length"])) for entry in table]


@pytest.mark.parametrize(("maintenance", "kind"), [("INVALIDATE", READS), ("FLUSH", WRITTEN)])
def test_a_plans_ranges_are_all_its_lines_and_no_more(
    recorder: Recorder, long_pool: Pool, maintenance: str, kind: str
) -> None:
    """``transfer/cache_maintenance.c``: adjacent ranges are joined, because each costs two
    fences.
    """
    core, number = recorder.library.lib, getattr(lib, f"BL_MAINTENANCE_{maintenance}")
    for plan, fewest in plans(long_pool):
        recorder.notes()
        struct = plan.struct()
        assert (
            core.bl_plan_maintenance(
                recorder.pool, recorder.library.of("bl_plan *", struct), number, 1
            )
            == 0
        )
        notes = recorder.notes()
        assert {what for what, _, _ in notes} == {kind}
        assert set(lines_of(only(notes, kind))) == set(lines_of(planned(plan)))
        assert len(notes) <= fewest
        assert (
            core.bl_plan_maintenance(
                recorder.pool,
                recorder.library.of("bl_plan *", struct),
                *(lib.BL_MAINTENANCE_FENCE, 1),
            )
            == 0
        )
        assert recorder.notes() == [(ORDERED, 0, 0)]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_flush_each_line_of_a_plan_once(
    recorder: Recorder, long_pool: Pool, threads: int
) -> None:
    """The parts of the threads meet within chunks, and a chunk may belong to several parts."""
    start = long_pool.geometry.data_offset
    address, sizes = np.full((1, 1), 1 << 20, np.uint64), np.array([1500 << 10])
    one = plan_blocks(address, sizes, np.array([start + 64], np.uint64))
    uneven = plan_blocks(address, sizes, np.array([start], np.uint64), chunk_size=600 << 10)
    for plan in (one, uneven):
        recorder.notes()
        struct = recorder.library.of("bl_plan *", plan.struct())
        flush = lib.BL_MAINTENANCE_FLUSH
        assert recorder.library.lib.bl_plan_maintenance(recorder.pool, struct, flush, threads) == 0
        notes = recorder.notes()
        assert sorted(lines_of(only(notes, WRITTEN))) == sorted(set(lines_of(planned(plan))))
        assert len(notes) == min(threads, 2)  # a part has at least 512 KiB
