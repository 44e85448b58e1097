# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A new copy engine needs one module and one registry entry; everything else finds it by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beluga import IndexServer, KVCache, Pool, config
from beluga.cli import pool as pool_command
from beluga.connectors.settings import PoolSettings, settings_of
from beluga.errors import ConnectorError, EngineUnavailableError
from beluga.transfer import ENGINES, Cost, Direction, PlannedEngine, crossovers, engine_names
from beluga.transfer.calibrate import measure as calibration
from tests.kvcache.conftest import digests, payload
from tests.transfer.toy_engine import ENTRY, ToyEngine

SIZE = 300_000  # bytes of a block


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry has the toy engine, and this machine has only it and the CPU."""
    none = dataclasses.replace(ENGINES["dsa"], why_none=lambda: "not on this machine")
    monkeypatch.setitem(ENGINES, "dsa", none)
    monkeypatch.setitem(ENGINES, "toy", ENTRY)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Cost]:
    """Nothing is cached, and this table has the costs: the toy engine is faster."""
    costs = {"cpu": Cost(0, 0, 1), "toy": Cost(100_000, 0, 0.01)}

    def measure(engine: Any, direction: Direction, offset: int) -> Cost:
        return costs[engine.name]

    monkeypatch.setattr(calibration, "measure", measure)
    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.delenv("BELUGA_TUNING")
    return costs


def stored_and_fetched(cache: KVCache, first: int, size: int = SIZE) -> bool:
    names, blocks = digests(first + 2)[first:], payload(2, size)
    assert cache.put(names, blocks).stored == 2
    found = np.zeros_like(blocks)
    return cache.get(names, found).hits == 2 and bool((found == blocks).all())


def test_cache_copies_with_the_named_engine(pool: Pool, server: IndexServer) -> None:
    with KVCache(pool, namespace="test", engine="toy") as cache:
        engine = cache.engine
        assert isinstance(engine, ToyEngine)
        assert stored_and_fetched(cache, 0)
        assert engine.written == engine.read == 2 * SIZE
    assert not engine.is_open


def test_an_engine_measured_as_faster_is_used_in_addition_to_the_cpu(
    pool: Pool, server: IndexServer, measured: dict[str, Cost]
) -> None:
    with KVCache(pool, namespace="test") as cache:
        assert isinstance(cache.engine, PlannedEngine)
        assert stored_and_fetched(cache, 0)
        assert cache.engine.stat.plans == {"cpu": 0, "toy": 2}
        assert stored_and_fetched(cache, 2, 1000)
        assert cache.engine.stat.plans == {"cpu": 0, "toy": 2}  # the CPU copies small ones in C
    found = crossovers(pool, 1)["toy"]
    assert (found.device, found.measured, found.written, found.read) == (
        "toy",
        True,
        101_011,
        101_011,
    )
    assert "toy (toy) from 98.6 KiB written" in pool_command._engines({"toy": found})


def test_an_engine_measured_as_slower_is_not_used(
    pool: Pool, server: IndexServer, measured: dict[str, Cost]
) -> None:
    measured["toy"] = Cost(100_000, 0, 2)
    with KVCache(pool, namespace="test") as cache:
        assert isinstance(cache.engine, PlannedEngine)
        assert stored_and_fetched(cache, 0)
        assert cache.engine.stat.plans == {"cpu": 0, "toy": 0}
    assert crossovers(pool, 1)["toy"].read is None


def test_an_engine_without_costs_or_measurement_is_not_used(
    pool: Pool, server: IndexServer
) -> None:
    with KVCache(pool, namespace="test") as cache:
        assert isinstance(cache.engine, PlannedEngine)
        assert stored_and_fetched(cache, 0)
        assert cache.engine.stat.plans == {"cpu": 0, "toy": 0}


def test_a_registered_engines_name_is_listed_everywhere(pool: Pool, server: IndexServer) -> None:
    assert engine_names() == ("auto", "cpu", "dsa", "cuda", "toy")
    with pytest.raises(EngineUnavailableError, match=r"use auto, cpu, dsa, cuda, toy$"):
        KVCache(pool, namespace="test", engine="tow")
    assert settings_of(PoolSettings, {"engine": "toy"}).engine == "toy"
    with pytest.raises(ConnectorError, match=r"must be auto or cpu or dsa or toy$"):
        settings_of(PoolSettings, {"engine": "tow"})


def test_an_unavailable_engine_is_rejected_with_its_reason(
    pool: Pool, server: IndexServer, monkeypatch: pytest.MonkeyPatch, measured: dict[str, Cost]
) -> None:
    entry = dataclasses.replace(ENTRY, why_none=lambda: "nobody has wound it up")
    monkeypatch.setitem(ENGINES, "toy", entry)
    with pytest.raises(ConnectorError, match="engine is toy, but nobody has wound it up"):
        settings_of(PoolSettings, {"engine": "toy"})
    with KVCache(pool, namespace="test") as cache:
        assert cache.engine is None
    assert crossovers(pool, 1)["toy"].why_none == "nobody has wound it up"
