# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The planner against the paper's crossings, and what is measured, kept and damaged."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beluga.errors import LayoutError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import (
    Course,
    CpuEngine,
    Plan,
    PlannedEngine,
    Planner,
    Way,
    calibrated,
    plan_blocks,
)
from beluga.transfer.calibration import fit, keep, kept, load
from beluga.transfer.cpu import CpuTransfer
from beluga.transfer.planner import DEFAULT, Cost

KIB = 1024
HOST = (Way.CPU, Way.DSA)
GPU = (Way.CUDA_DIRECT, Way.CUDA_STAGED)


@pytest.mark.parametrize("course", Course)
def test_defaults_cross_where_the_paper_says(course: Course) -> None:
    planner = Planner()
    for size in (64, 1 * KIB, 4 * KIB):
        assert planner.choose(course, size, 1, HOST) == Way.CPU
    for size in (16 * KIB, 1 << 20):
        assert planner.choose(course, size, 1, HOST) == Way.DSA
    crossing = planner.crossover(course, Way.CPU, Way.DSA)
    assert crossing is not None
    assert 4 * KIB < crossing <= 16 * KIB
    assert planner.choose(course, 23_000, 1, GPU) == Way.CUDA_DIRECT
    assert planner.choose(course, 25_000, 1, GPU) == Way.CUDA_STAGED


def test_only_what_is_at_hand_is_chosen() -> None:
    planner = Planner()
    assert planner.choose(Course.GATHER_WRITE, 1 << 20, 1, [Way.CPU]) == Way.CPU
    assert planner.choose(Course.GATHER_WRITE, 1 << 20, 1, []) is None
    assert Planner({}).choose(Course.GATHER_WRITE, 1 << 20, 1, HOST) is None


def test_many_small_fragments_cost_what_the_table_says_of_them() -> None:
    table = dict(DEFAULT)
    table[Way.DSA, Course.SCATTER_READ] = Cost(0, 1000, 0)
    planner = Planner(table)
    assert planner.choose(Course.SCATTER_READ, 1 << 20, 1, HOST) == Way.DSA
    assert planner.choose(Course.SCATTER_READ, 1 << 20, 1024, HOST) == Way.CPU


class Noted:
    """Says who was asked, and for what."""

    def __init__(self, name: str, asked: list[tuple[str, Course, int]]) -> None:
        self.name, self._asked = name, asked

    def gather_write(self, plan: Plan) -> CpuTransfer:
        self._asked.append((self.name, Course.GATHER_WRITE, plan.size))
        return CpuTransfer(None)

    def scatter_read(self, plan: Plan) -> CpuTransfer:
        self._asked.append((self.name, Course.SCATTER_READ, plan.size))
        return CpuTransfer(None)

    def close(self) -> None:
        self._asked.append((self.name, Course.GATHER_WRITE, -1))


def test_each_plan_goes_to_the_engine_that_is_cheapest_for_it() -> None:
    asked: list[tuple[str, Course, int]] = []
    engine = PlannedEngine(Planner(), {way: Noted(str(way), asked) for way in HOST})
    small, large = (
        plan_blocks(np.array([[4096]], np.uint64), np.array([size]), np.array([0]))
        for size in (2048, 1 << 20)
    )
    engine.gather_write(small).wait()
    engine.scatter_read(large).wait()
    engine.close()
    assert asked == [
        ("cpu", Course.GATHER_WRITE, 2048),
        ("dsa", Course.SCATTER_READ, 1 << 20),
        ("cpu", Course.GATHER_WRITE, -1),
        ("dsa", Course.GATHER_WRITE, -1),
    ]
    with pytest.raises(LayoutError, match="none of cuda-direct"):
        PlannedEngine(
            Planner({key: cost for key, cost in DEFAULT.items() if key[0] in HOST}),
            {Way.CUDA_DIRECT: Noted("cuda-direct", asked)},
        )


@given(
    size=st.integers(1, 1 << 24),
    fragments=st.integers(1, 4096),
    course=st.sampled_from(Course),
    costs=st.lists(st.tuples(*[st.floats(0, 1e4)] * 3), min_size=4, max_size=4),
)
def test_nothing_at_hand_is_cheaper(
    size: int, fragments: int, course: Course, costs: list[tuple[float, float, float]]
) -> None:
    table = {(way, course): Cost(*cost) for way, cost in zip(Way, costs, strict=True)}
    chosen = Planner(table).choose(course, size, fragments, list(Way))
    assert chosen is not None
    least = min(cost.of(size, fragments) for cost in table.values())
    assert table[chosen, course].of(size, fragments) == least


def test_crossover_of_lines() -> None:
    cheap, fast = Cost(100, 0, 2), Cost(500, 0, 1)
    course = Course.GATHER_WRITE
    planner = Planner({(Way.CPU, course): cheap, (Way.DSA, course): fast})
    assert planner.crossover(course, Way.CPU, Way.DSA) == 400
    assert planner.crossover(course, Way.DSA, Way.CPU) is None
    assert planner.crossover(course, Way.CPU, Way.CPU) == 0


def test_a_line_is_found_again() -> None:
    cost = Cost(300.0, 25.0, 0.125)
    shapes = [(4096, 1), (262144, 64), (65536, 1), (262144, 4), (1048576, 16)]
    found = fit(shapes, [cost.of(size, fragments) for size, fragments in shapes])
    assert np.allclose([found.start_ns, found.fragment_ns, found.byte_ns], [300, 25, 0.125])


@pytest.fixture
def pool(memory_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    try:
        with Pool.create([folder / "a"], device_size=8 * STRIPE_SIZE, sparse=True) as made:
            yield made
    finally:
        shutil.rmtree(folder)


class Counted(CpuEngine):
    """How often it was asked."""

    copies = 0

    def gather_write(self, plan):  # type: ignore[no-untyped-def]
        self.copies += 1
        return super().gather_write(plan)


def test_a_machine_is_measured_once(pool: Pool) -> None:
    offset = pool.geometry.data_offset
    engine = Counted(pool, threads=1)
    table = calibrated(pool, offset, 1 << 20, {Way.CPU: engine})
    measured = engine.copies
    assert measured > 0
    assert calibrated(pool, offset, 1 << 20, {Way.CPU: engine}) == table
    assert engine.copies == measured
    for course in Course:
        assert table[Way.CPU, course].of(1 << 20, 16) > 0
        assert table[Way.DSA, course] == DEFAULT[Way.DSA, course]


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "{}", '{"version": 0, "costs": []}', '{"version": 1, "costs": [{"way": "x"}]}'],
)
def test_a_damaged_file_is_measured_again(pool: Pool, damage: str) -> None:
    offset, path = pool.geometry.data_offset, kept(pool)
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    engine = Counted(pool, threads=1)
    calibrated(pool, offset, 1 << 20, {Way.CPU: engine})
    assert engine.copies > 0
    assert load(path) is not None


def test_a_table_is_kept_as_it_is(tmp_path: Path) -> None:
    keep(tmp_path / "deep" / "table.json", DEFAULT)
    assert load(tmp_path / "deep" / "table.json") == DEFAULT
    assert load(tmp_path / "none.json") is None
