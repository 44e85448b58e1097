# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Caches choose an engine on a machine with an emulated DSA."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from numpy.typing import NDArray

from beluga import IndexServer, KVCache, Pool
from beluga.errors import EngineUnavailableError
from beluga.transfer import (
    ENGINES,
    DsaEngine,
    LinkSettings,
    PlannedEngine,
    PlannedStat,
    TransferClass,
    dsa,
)
from tests.kvcache.conftest import digests, payload
from tests.transfer import stand_in

SMALL, LARGE = (
    1000,
    300_000,
)  # block sizes on both sides of the crossover in the paper's table, which tests use


def stat_of(cache: KVCache) -> PlannedStat:
    assert isinstance(cache.engine, PlannedEngine)
    return cache.engine.stat


def fetched(cache: KVCache, start: int, blocks: NDArray[np.uint8]) -> bool:
    targets = np.zeros_like(blocks)
    result = cache.get(digests(len(blocks), start=start), targets)
    return (result.hits, result.mismatches) == (len(blocks), 0) and np.array_equal(targets, blocks)


@pytest.mark.parametrize("linked", [False, True], ids=["alone", "linked"])
def test_small_batches_use_the_cpu_and_large_ones_the_dsa(
    pool: Pool,
    server: IndexServer,
    cache: KVCache,
    linked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in.install(monkeypatch)
    link = LinkSettings() if linked else None
    small, large = payload(2, SMALL), payload(3, LARGE)
    with KVCache(pool, namespace="test", link=link, threads=2) as chosen:
        assert chosen.put(digests(2), small).stored == 2
        assert fetched(chosen, 0, small)
        assert stat_of(chosen).plans == {"cpu": 0, "dsa": 0}  # C did it
        assert chosen.put(digests(3, start=2), large).stored == 3
        assert fetched(chosen, 2, large)
        assert stat_of(chosen) == PlannedStat({"cpu": 0, "dsa": 2})
        if linked:
            carried = chosen.transfer_stats()
            for kind in (TransferClass.OFFLOAD, TransferClass.ONBOARD):
                assert carried[kind].bytes == small.nbytes + large.nbytes
    assert fetched(cache, 0, small)
    assert fetched(cache, 2, large)


def test_a_failed_dsa_gets_no_more_plans(
    pool: Pool,
    server: IndexServer,
    cache: KVCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand_in.install(monkeypatch, stand_in.refusing)
    blocks = payload(6, LARGE)
    with KVCache(pool, namespace="test") as chosen, caplog.at_level(logging.WARNING):
        for index in range(6):
            block = blocks[index : index + 1]
            assert chosen.put(digests(1, start=index), block).stored == 1
            assert fetched(chosen, index, block)
        stat = stat_of(chosen)
    assert fetched(cache, 0, blocks)
    assert stat.plans["dsa"] < 6
    assert list(stat.faults) == ["dsa"]
    assert [record.getMessage() for record in caplog.records] == [
        "beluga: dsa is disabled, the CPU copies: the device fails most descriptors, which the "
        "CPU then executes"
    ]


@pytest.mark.parametrize("pool", ["hardware"], indirect=True)  # takes seconds
def test_a_dsa_that_stalls_is_disabled(
    pool: Pool,
    server: IndexServer,
    cache: KVCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its descriptors never end. The cache waits for it twice, and then stops using it."""
    stand_in.install(monkeypatch, stand_in.silent)
    monkeypatch.setattr(dsa, "_STALL_S", 0.3)
    blocks = payload(2, LARGE)
    with KVCache(pool, namespace="test") as chosen, caplog.at_level(logging.WARNING):
        assert chosen.put(digests(2), blocks).stored == 2
        assert fetched(chosen, 0, blocks)
        assert stat_of(chosen).replayed == 1
    assert fetched(cache, 0, blocks)
    assert len(caplog.records) == 1
    assert "has completed nothing for 0.3 s" in caplog.text


def test_every_engine_name_selects_its_engine(pool: Pool, server: IndexServer) -> None:
    if ENGINES["dsa"].why_none() is None:
        pytest.skip("there is a DSA")
    for name in ("auto", "cpu"):
        with KVCache(pool, namespace="test", engine=name) as cache:  # type: ignore[arg-type]
            assert cache.engine is None
    for name in ("dsa", "gpu"):
        with pytest.raises(EngineUnavailableError):
            KVCache(pool, namespace="test", engine=name)  # type: ignore[arg-type]


def test_only_the_dsa_copies_if_it_is_selected(
    pool: Pool, server: IndexServer, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    small = payload(2, SMALL)
    with KVCache(pool, namespace="test", engine="dsa") as chosen:
        engine = chosen.engine
        assert isinstance(engine, DsaEngine)
        assert chosen.put(digests(2), small).stored == 2
        assert engine.stat.descriptors >= 2
    assert fetched(cache, 0, small)
