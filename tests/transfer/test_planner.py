# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The planner has the paper's crossovers, and handles damaged files."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from beluga.errors import (
    BelugaError,
    ChecksumError,
    DeviceFaultError,
    LayoutError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import (
    CopyEngine,
    CpuEngine,
    Direction,
    Plan,
    PlannedEngine,
    PlannedStat,
    Planner,
    calibrated,
    plan_blocks,
)
from beluga.transfer.calibrate.calibration_cache import CalibrationCache
from beluga.transfer.calibrate.cost import Cost
from beluga.transfer.calibrate.measure import fit, stored_table
from beluga.transfer.cpu import CpuTransfer
from beluga.transfer.select.registry import default_costs

KIB = 1024
HOST = ("cpu", "dsa")
NAMES = ("toy", "dsa", "cpu")


@pytest.mark.parametrize("direction", Direction)
def test_default_crossovers_are_those_of_the_paper(direction: Direction) -> None:
    planner = Planner(default_costs())
    for size in (64, 1 * KIB, 4 * KIB):
        assert planner.choose(direction, size, 1, HOST) == "cpu"
    for size in (16 * KIB, 1 << 20):
        assert planner.choose(direction, size, 1, HOST) == "dsa"
    crossing = planner.crossover(direction, "cpu", "dsa")
    assert crossing is not None
    assert 4 * KIB < crossing <= 16 * KIB


def test_only_available_engines_are_chosen() -> None:
    planner = Planner(default_costs())
    assert planner.choose(Direction.WRITE, 1 << 20, 1, ["cpu"]) == "cpu"
    assert planner.choose(Direction.WRITE, 1 << 20, 1, []) is None
    assert Planner({}).choose(Direction.WRITE, 1 << 20, 1, HOST) is None


def test_costs_of_small_fragments_match_the_table() -> None:
    table = dict(default_costs())
    table["dsa", Direction.READ] = Cost(0, 1000, 0)
    planner = Planner(table)
    assert planner.choose(Direction.READ, 1 << 20, 1, HOST) == "dsa"
    assert planner.choose(Direction.READ, 1 << 20, 1024, HOST) == "cpu"


class RecordingEngine:
    """Records the calls of each engine."""

    def __init__(self, name: str, calls: list[tuple[str, Direction, int]]) -> None:
        self.name, self._calls = name, calls

    def gather_write(self, plan: Plan) -> CpuTransfer:
        self._calls.append((self.name, Direction.WRITE, plan.size))
        return CpuTransfer(None)

    def scatter_read(self, plan: Plan) -> CpuTransfer:
        self._calls.append((self.name, Direction.READ, plan.size))
        return CpuTransfer(None)

    def close(self) -> None:
        self._calls.append((self.name, Direction.WRITE, -1))


def test_each_plan_uses_its_cheapest_engine() -> None:
    requests: list[tuple[str, Direction, int]] = []
    engine = PlannedEngine(
        Planner(default_costs()), {way: RecordingEngine(str(way), requests) for way in HOST}
    )
    small, large = (
        plan_blocks(np.array([[4096]], np.uint64), np.array([size]), np.array([0]))
        for size in (2048, 1 << 20)
    )
    engine.gather_write(small).wait()
    engine.scatter_read(large).wait()
    engine.close()
    assert requests == [
        ("cpu", Direction.WRITE, 2048),
        ("dsa", Direction.READ, 1 << 20),
        ("cpu", Direction.WRITE, -1),
        ("dsa", Direction.WRITE, -1),
    ]
    with pytest.raises(LayoutError, match="no costs of toy"):
        PlannedEngine(Planner(default_costs()), {"toy": RecordingEngine("toy", requests)})


@pytest.mark.parametrize(
    ("size", "fragments", "chosen"),
    [
        (300, 1, "toy"),  # 610, where the CPU has 700 and the DSA 800
        (300, 20, "cpu"),  # 700, 800 and 800
        (400, 20, "cpu"),  # 900 and 900: the first one
        (401, 20, "dsa"),  # 902 and 901
    ],
)
def test_the_cheapest_engine_is_chosen(size: int, fragments: int, chosen: str) -> None:
    costs = {
        "cpu": Cost(100, 0, 2),
        "dsa": Cost(500, 0, 1),
        "toy": Cost(0, 10, 2),
    }
    planner = Planner({(name, Direction.READ): cost for name, cost in costs.items()})
    assert planner.choose(Direction.READ, size, fragments, NAMES) == chosen


def test_the_crossover_is_the_intersection_of_two_lines() -> None:
    cheap, fast = Cost(100, 0, 2), Cost(500, 0, 1)
    direction = Direction.WRITE
    planner = Planner({("cpu", direction): cheap, ("dsa", direction): fast})
    assert planner.crossover(direction, "cpu", "dsa") == 400
    assert planner.crossover(direction, "dsa", "cpu") is None
    assert planner.crossover(direction, "cpu", "cpu") == 0


def test_a_fit_recovers_the_line() -> None:
    cost = Cost(300.0, 25.0, 0.125)
    shapes = [(4096, 1), (262144, 64), (65536, 1), (262144, 4), (1048576, 16)]
    found = fit(shapes, [cost.of(size, fragments) for size, fragments in shapes])
    assert np.allclose([found.start_ns, found.fragment_ns, found.byte_ns], [300, 25, 0.125])


def test_no_term_of_a_cost_is_negative_and_the_fit_is_repeated_without_it() -> None:
    """Some CPUs copy many fragments as fast as a single one."""
    shapes = [(4096, 1), (262144, 64), (65536, 1), (262144, 4), (1048576, 16)]
    times = [1000 + size / 8 - 60 * fragments for size, fragments in shapes]
    found = fit(shapes, times)
    assert found.fragment_ns == 0
    for (size, fragments), time in zip(shapes, times, strict=True):
        assert found.of(size, fragments) == pytest.approx(time, rel=0.1)


@pytest.fixture
def pool(memory_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.delenv("BELUGA_TUNING", raising=False)
    try:
        with Pool.create([folder / "a"], device_size=8 * STRIPE_SIZE, sparse=True) as made:
            yield made
    finally:
        shutil.rmtree(folder)


class Counted(CpuEngine):
    """Counts the calls of an engine."""

    copies = 0

    def gather_write(self, plan):  # type: ignore[no-untyped-def]
        Counted.copies += 1
        return super().gather_write(plan)


def cpu_of(scratch: Pool) -> dict[tuple[str, Direction], CopyEngine]:
    engine = Counted(scratch, threads=1)
    return {("cpu", direction): engine for direction in Direction}


def test_a_machine_is_measured_once(pool: Pool) -> None:
    before = Counted.copies
    table = calibrated(pool, "1 thread", cpu_of)
    measured = Counted.copies
    assert measured > before
    assert calibrated(pool, "1 thread", cpu_of) == table == stored_table(pool, "1 thread")
    assert Counted.copies == measured
    assert stored_table(pool, "2 threads") == {}
    assert set(table) == {("cpu", direction) for direction in Direction}
    for cost in table.values():
        assert cost.of(1 << 20, 16) > 0


def test_costs_that_cannot_or_must_not_be_stored_are_not_measured(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Counted.copies
    with monkeypatch.context() as patch:
        patch.setenv("BELUGA_TUNING", "off")
        assert calibrated(pool, "", cpu_of) == {}
    monkeypatch.setattr(CalibrationCache, "can_write", lambda _: False)
    assert calibrated(pool, "", cpu_of) == {}
    assert Counted.copies == before
    monkeypatch.undo()
    monkeypatch.setattr(
        CalibrationCache, "read", lambda *_: pytest.fail("kept costs are not read again")
    )
    monkeypatch.setenv("BELUGA_TUNING", "off")
    assert stored_table(pool, "") == {}


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "{}",
        "null",
        '{"version": 0, "machine": [], "costs: ": []}',
        '{"version": 2, "machine": ["of somebody else"], "costs: ": []}',
        "costs: [{}]",
        'costs: [{"engine": "x"}]',
        'costs: {"engine": "cpu"}',
        "costs: 7",
        'costs: [{"engine": "cpu", "direction": "READ", "cost": [1, 2, NaN]}]',
        'costs: [{"engine": "cpu", "direction": "READ", "cost": [1, -2, 3]}]',
    ],
)
def test_a_damaged_or_foreign_file_is_measured_again(pool: Pool, damage: str) -> None:
    kept, before = CalibrationCache(pool), Counted.copies
    if damage.startswith("costs: "):  # for this machine and version, but without a table
        kept.write("costs: ", json.loads(damage.removeprefix("costs: ")))
    else:
        kept.path.parent.mkdir(parents=True)
        kept.path.write_text(damage)
    calibrated(pool, "", cpu_of)
    assert Counted.copies > before
    assert len(stored_table(pool, "")) == len(Direction)


class Failing(RecordingEngine):
    """Raises these errors, at the start of a copy or when the copy is waited for."""

    fault: str | None = None

    def __init__(self, *, starts: BelugaError | None = None, ends: BelugaError | None = None):
        super().__init__("dsa", [])
        self._starts, self._ends = starts, ends

    def gather_write(self, plan: Plan) -> CpuTransfer:
        if self._starts is not None:
            raise self._starts
        return CpuTransfer(self._ends)


LARGE = plan_blocks(np.array([[4096]], np.uint64), np.array([1 << 20]), np.array([0]))


@pytest.mark.parametrize(
    "failing",
    [
        Failing(starts=TransferError("it is gone")),
        Failing(ends=TransferError("it is gone")),
    ],
    ids=["starting", "ending"],
)
def test_the_cpu_executes_plans_that_another_engine_fails(
    failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    requests: list[tuple[str, Direction, int]] = []
    engine = PlannedEngine(
        Planner(default_costs()), {"cpu": RecordingEngine("cpu", requests), "dsa": failing}
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            transfer = engine.gather_write(LARGE)
            transfer.wait()
            transfer.wait()
            assert transfer.done()
    assert requests == [("cpu", Direction.WRITE, 1 << 20)] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "beluga: dsa is disabled, the CPU copies: it is gone"
    ]
    assert engine.stat == PlannedStat({"cpu": 2, "dsa": 1}, 1, {"dsa": "it is gone"})


@pytest.mark.parametrize(
    "error",
    [
        ChecksumError("other bytes"),
        TransferCancelledError("stopped"),
        TransferTimeoutError("it goes on"),
        DeviceFaultError("the pool's memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_caller_are_raised(error: BelugaError) -> None:
    requests: list[tuple[str, Direction, int]] = []
    engine = PlannedEngine(
        Planner(default_costs()),
        {"cpu": RecordingEngine("cpu", requests), "dsa": Failing(ends=error)},
    )
    with pytest.raises(type(error)):
        engine.gather_write(LARGE).wait()
    assert requests == []
    assert engine.stat.faults == {}


def test_an_engine_without_own_work_is_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    engine = PlannedEngine(
        Planner(default_costs()), {"cpu": RecordingEngine("cpu", []), "dsa": failing}
    )
    engine.gather_write(LARGE).wait()
    assert engine.choose(Direction.WRITE, 1 << 20, 1) == "dsa"
    failing.fault = "the CPU does it"
    engine.gather_write(LARGE).wait()
    assert engine.choose(Direction.WRITE, 1 << 20, 1) == "cpu"
    assert engine.stat.replayed == 0
    assert "the CPU does it" in caplog.text
