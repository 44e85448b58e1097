# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The planner against the paper's crossings, and what is measured, kept and damaged."""

from __future__ import annotations

import json
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
    CpuEngine,
    Direction,
    EngineKind,
    Plan,
    PlannedEngine,
    Planner,
    calibrated,
    plan_blocks,
)
from beluga.transfer.calibration import fit, table_of
from beluga.transfer.cpu import CpuTransfer
from beluga.transfer.kept import Kept
from beluga.transfer.planner import DEFAULT, Cost

KIB = 1024
HOST = (EngineKind.CPU, EngineKind.DSA)
GPU = (EngineKind.CUDA_DIRECT, EngineKind.CUDA_STAGED)


@pytest.mark.parametrize("direction", Direction)
def test_defaults_cross_where_the_paper_says(direction: Direction) -> None:
    planner = Planner()
    for size in (64, 1 * KIB, 4 * KIB):
        assert planner.choose(direction, size, 1, HOST) == EngineKind.CPU
    for size in (16 * KIB, 1 << 20):
        assert planner.choose(direction, size, 1, HOST) == EngineKind.DSA
    crossing = planner.crossover(direction, EngineKind.CPU, EngineKind.DSA)
    assert crossing is not None
    assert 4 * KIB < crossing <= 16 * KIB
    assert planner.choose(direction, 23_000, 1, GPU) == EngineKind.CUDA_DIRECT
    assert planner.choose(direction, 25_000, 1, GPU) == EngineKind.CUDA_STAGED


def test_only_what_is_at_hand_is_chosen() -> None:
    planner = Planner()
    assert planner.choose(Direction.WRITE, 1 << 20, 1, [EngineKind.CPU]) == EngineKind.CPU
    assert planner.choose(Direction.WRITE, 1 << 20, 1, []) is None
    assert Planner({}).choose(Direction.WRITE, 1 << 20, 1, HOST) is None


def test_many_small_fragments_cost_what_the_table_says_of_them() -> None:
    table = dict(DEFAULT)
    table[EngineKind.DSA, Direction.READ] = Cost(0, 1000, 0)
    planner = Planner(table)
    assert planner.choose(Direction.READ, 1 << 20, 1, HOST) == EngineKind.DSA
    assert planner.choose(Direction.READ, 1 << 20, 1024, HOST) == EngineKind.CPU


class Noted:
    """Says who was asked, and for what."""

    def __init__(self, name: str, asked: list[tuple[str, Direction, int]]) -> None:
        self.name, self._asked = name, asked

    def gather_write(self, plan: Plan) -> CpuTransfer:
        self._asked.append((self.name, Direction.WRITE, plan.size))
        return CpuTransfer(None)

    def scatter_read(self, plan: Plan) -> CpuTransfer:
        self._asked.append((self.name, Direction.READ, plan.size))
        return CpuTransfer(None)

    def close(self) -> None:
        self._asked.append((self.name, Direction.WRITE, -1))


def test_each_plan_goes_to_the_engine_that_is_cheapest_for_it() -> None:
    asked: list[tuple[str, Direction, int]] = []
    engine = PlannedEngine(Planner(), {way: Noted(str(way), asked) for way in HOST})
    small, large = (
        plan_blocks(np.array([[4096]], np.uint64), np.array([size]), np.array([0]))
        for size in (2048, 1 << 20)
    )
    engine.gather_write(small).wait()
    engine.scatter_read(large).wait()
    engine.close()
    assert asked == [
        ("cpu", Direction.WRITE, 2048),
        ("dsa", Direction.READ, 1 << 20),
        ("cpu", Direction.WRITE, -1),
        ("dsa", Direction.WRITE, -1),
    ]
    with pytest.raises(LayoutError, match="none of cuda-direct"):
        PlannedEngine(
            Planner({key: cost for key, cost in DEFAULT.items() if key[0] in HOST}),
            {EngineKind.CUDA_DIRECT: Noted("cuda-direct", asked)},
        )


@given(
    size=st.integers(1, 1 << 24),
    fragments=st.integers(1, 4096),
    direction=st.sampled_from(Direction),
    costs=st.lists(st.tuples(*[st.floats(0, 1e4)] * 3), min_size=4, max_size=4),
)
def test_nothing_at_hand_is_cheaper(
    size: int, fragments: int, direction: Direction, costs: list[tuple[float, float, float]]
) -> None:
    table = {(way, direction): Cost(*cost) for way, cost in zip(EngineKind, costs, strict=True)}
    chosen = Planner(table).choose(direction, size, fragments, list(EngineKind))
    assert chosen is not None
    least = min(cost.of(size, fragments) for cost in table.values())
    assert table[chosen, direction].of(size, fragments) == least


def test_crossover_of_lines() -> None:
    cheap, fast = Cost(100, 0, 2), Cost(500, 0, 1)
    direction = Direction.WRITE
    planner = Planner({(EngineKind.CPU, direction): cheap, (EngineKind.DSA, direction): fast})
    assert planner.crossover(direction, EngineKind.CPU, EngineKind.DSA) == 400
    assert planner.crossover(direction, EngineKind.DSA, EngineKind.CPU) is None
    assert planner.crossover(direction, EngineKind.CPU, EngineKind.CPU) == 0


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
    table = calibrated(pool, offset, 1 << 20, {EngineKind.CPU: engine})
    measured = engine.copies
    assert measured > 0
    assert calibrated(pool, offset, 1 << 20, {EngineKind.CPU: engine}) == table
    assert engine.copies == measured
    for direction in Direction:
        assert table[EngineKind.CPU, direction].of(1 << 20, 16) > 0
        assert table[EngineKind.DSA, direction] == DEFAULT[EngineKind.DSA, direction]


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "{}",
        "null",
        '{"version": 0, "machine": [], "costs": []}',
        '{"version": 2, "machine": ["of somebody else"], "costs": []}',
        "costs: [{}]",
        'costs: [{"engine": "x"}]',
        'costs: {"engine": "cpu"}',
        "costs: 7",
    ],
)
def test_a_damaged_or_foreign_file_is_measured_again(pool: Pool, damage: str) -> None:
    offset, kept = pool.geometry.data_offset, Kept(pool)
    if damage.startswith("costs: "):  # of this machine and version, but no table
        kept.write("costs", json.loads(damage.removeprefix("costs: ")))
    else:
        kept.path.parent.mkdir(parents=True)
        kept.path.write_text(damage)
    engine = Counted(pool, threads=1)
    calibrated(pool, offset, 1 << 20, {EngineKind.CPU: engine})
    assert engine.copies > 0
    assert len(table_of(Kept(pool).read("costs"))) == len(Direction)
