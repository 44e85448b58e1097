# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An engine is chosen by what this machine has, and a defective DSA stops no copy."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from beluga import config
from beluga.errors import EngineUnavailableError
from beluga.pool import Pool
from beluga.transfer import (
    ENGINES,
    Chosen,
    CpuEngine,
    Direction,
    choose,
    crossovers,
    dsa,
)
from beluga.transfer import dsa as sysfs
from beluga.transfer.calibrate import measure as calibration
from beluga.transfer.calibrate.calibration_cache import CalibrationCache
from beluga.transfer.calibrate.cost import Cost
from beluga.transfer.dsa import open_device, work_queues
from tests.transfer import stand_in

HOST = ("cpu", "dsa")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Direction, int]]:
    """Nothing is cached, and costs are invented; calls are recorded with engines and threads. The
    CPU costs 1 ns per byte, others 100 us regardless of size.
    """
    requests: list[tuple[str, Direction, int]] = []

    def measure(engine: Any, direction: Direction, offset: int) -> Cost:
        threads = engine.threads if isinstance(engine, CpuEngine) else 0
        requests.append((engine.name, direction, threads))
        return Cost(0, 0, 1) if engine.name == "cpu" else Cost(100_000, 0, 0)

    monkeypatch.setattr(calibration, "measure", measure)
    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.delenv("BELUGA_TUNING")
    return requests


def test_without_a_dsa_the_cpu_copies_and_nothing_is_measured(
    pool: Pool, measured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysfs, "work_queues", lambda _: [])
    for name in ("auto", "cpu"):
        assert choose(pool, name, 1) == Chosen()
    assert measured == []
    assert not CalibrationCache(pool).path.exists()
    found = crossovers(pool, 1)["dsa"]
    assert found.device is None
    assert found.why_none is not None


def test_a_requested_engine_that_is_unavailable_is_an_error(pool: Pool) -> None:
    if ENGINES["dsa"].why_none() is None:
        pytest.skip("there is a DSA")
    with pytest.raises(EngineUnavailableError, match="DSA"):
        choose(pool, "dsa", 1)
    with pytest.raises(EngineUnavailableError, match="use auto, cpu, dsa, cuda"):
        choose(pool, "software", 1)
    mine = CpuEngine(pool, 1)
    assert choose(pool, mine, 1) == Chosen(mine)


def test_a_dsa_is_measured_once_for_each_number_of_threads(
    pool: Pool, measured: list[tuple[str, Direction, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    for threads in (1, 3, 1, 3):
        chosen = choose(pool, "auto", threads)
        assert list(chosen.beside) == ["dsa"]
        assert chosen.planner is not None
        assert chosen.planner.choose(Direction.WRITE, 99_000, 1, HOST) == "cpu"
        assert chosen.planner.choose(Direction.READ, 101_000, 1, HOST) == "dsa"
        chosen.close()
    cpu = [(direction, threads) for name, direction, threads in measured if name == "cpu"]
    put, get = Direction.WRITE, Direction.READ
    assert cpu == [(put, 1), (get, 1), (put, 1), (get, 3)]  # a put uses one thread
    found = crossovers(pool, 3)["dsa"]
    assert (found.device, found.measured, found.written, found.read) == (
        ("stand-in", True, 100_000, 100_000)
    )
    assert not crossovers(pool, 2)["dsa"].measured
    assert len(measured) == 8


def test_a_table_of_another_machine_is_ignored(
    pool: Pool, measured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    choose(pool, "auto", 1).close()
    whole = json.loads(CalibrationCache(pool).path.read_text())
    whole["machine"][0] = "another CPU"
    CalibrationCache(pool).path.write_text(json.dumps(whole))
    assert not crossovers(pool, 1)["dsa"].measured
    choose(pool, "auto", 1).close()
    assert len(measured) == 8


def test_without_measurements_the_papers_values_apply(
    pool: Pool, measured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    monkeypatch.setenv("BELUGA_TUNING", "off")
    chosen = choose(pool, "auto", 1)
    assert chosen.planner is not None
    for size, kind in ((4096, "cpu"), (16384, "dsa")):
        assert chosen.planner.choose(Direction.READ, size, 1, HOST) == kind
    chosen.close()
    assert measured == []


def broken(pool: Pool) -> Any:
    raise RuntimeError("as no engine should")


@pytest.mark.parametrize("opened", [stand_in.refusing, broken], ids=["refusing", "broken"])
def test_the_cpu_copies_after_any_fault_of_the_dsa(
    pool: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    opened: Any,
) -> None:
    """Costs are measured, and none is stored: the CPU did the work of the queue."""
    stand_in.install(monkeypatch, opened)
    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.delenv("BELUGA_TUNING")
    with caplog.at_level(logging.WARNING):
        assert choose(pool, "auto", 1) == Chosen()
    (record,) = caplog.records
    assert "the CPU copies without dsa: " in record.getMessage()
    kept = CalibrationCache(pool).path
    assert "costs" not in (kept.read_text() if kept.exists() else "")


def test_a_work_queue_that_does_not_open_is_logged(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue is found through sysfs and its device file, as on a machine with a DSA."""
    folder = tmp_path / "sys" / "wq0.0"
    folder.mkdir(parents=True)
    for name, text in (
        ("mode", "shared"),
        ("type", "user"),
        ("state", "enabled"),
        ("size", "16"),
        ("max_transfer_size", "2097152"),
    ):
        (folder / name).write_text(text)
    queues = work_queues(tmp_path / "sys")
    monkeypatch.setattr(sysfs, "work_queues", lambda *_: queues)
    opened = functools.partial(open_device, sysfs=tmp_path / "sys", devices=tmp_path / "dev")
    monkeypatch.setattr(dsa, "open_device", opened)
    with caplog.at_level(logging.WARNING):
        assert choose(pool, "auto", 1) == Chosen()
    assert "wq0.0: No such file or directory; give this user the device file" in caplog.text
    with pytest.raises(EngineUnavailableError, match="No such file"):
        choose(pool, "dsa", 1)
    assert "No such file" in str(crossovers(pool, 1)["dsa"].why_none)


def test_all_engines_are_closed_even_if_one_raises(pool: Pool) -> None:
    class Ends:
        closed = False

        def close(self) -> None:
            self.closed = True
            raise RuntimeError("as no engine should")

    ends: Any = [Ends(), Ends()]
    with pytest.raises(RuntimeError):
        Chosen(beside={"one": ends[0], "other": ends[1]}, made=True).close()
    assert [end.closed for end in ends] == [True, True]
    Chosen(ends[0]).close()  # its engines are of another process
