# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engine of a cache: by name, by what this machine has, and by the size of a batch."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from beluga import IndexServer, KVCache, Pool
from beluga.cli import pool as pool_command
from beluga.connectors.settings import PoolSettings, settings_of
from beluga.errors import ConnectorError, EngineUnavailableError
from beluga.transfer import (
    ENGINES,
    CpuEngine,
    DsaEngine,
    EngineChoice,
    EngineEntry,
    LinkSettings,
    Plan,
    Transfer,
    TransferClass,
    choose_engine,
    dsa,
    engine_facts,
    engine_names,
)
from beluga.transfer.dsa import open_device, work_queues
from tests.kvcache.conftest import digests, payload
from tests.transfer import stand_in

SMALL, LARGE = 1000, 300_000  # bytes of a block, on both sides of the DSA's 16 KiB


class ToyEngine:
    """An engine that a contributor might add. It copies with the CPU, and counts the bytes."""

    name = "toy"

    def __init__(self, pool: Pool) -> None:
        self._copies = CpuEngine(pool, 1)
        self.written = self.read = 0
        self.is_open = True

    def gather_write(self, plan: Plan) -> Transfer:
        assert self.is_open
        self.written += plan.size
        return self._copies.gather_write(plan)

    def scatter_read(self, plan: Plan) -> Transfer:
        assert self.is_open
        self.read += plan.size
        return self._copies.scatter_read(plan)

    def close(self) -> None:
        self.is_open = False


TOY = EngineEntry(name="toy", open=lambda pool, threads: ToyEngine(pool))


@pytest.fixture
def add_toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that registers the toy engine on a machine with only it and the CPU."""

    def add(**changes: object) -> None:
        none = dataclasses.replace(ENGINES["dsa"], why_none=lambda: "not on this machine")
        monkeypatch.setitem(ENGINES, "dsa", none)
        entry = dataclasses.replace(TOY, **changes)  # type: ignore[arg-type]
        monkeypatch.setitem(ENGINES, "toy", entry)

    return add


def stored_and_fetched(cache: KVCache, first: int, blocks: NDArray[np.uint8]) -> bool:
    names = digests(len(blocks), start=first)
    assert cache.put(names, blocks).stored == len(blocks)
    return fetched(cache, first, blocks)


def fetched(cache: KVCache, first: int, blocks: NDArray[np.uint8]) -> bool:
    targets = np.zeros_like(blocks)
    result = cache.get(digests(len(blocks), start=first), targets)
    return (result.hits, result.mismatches) == (len(blocks), 0) and np.array_equal(targets, blocks)


def test_a_named_engine_copies_everything(
    pool: Pool, server: IndexServer, add_toy: Callable[..., None]
) -> None:
    add_toy()
    with KVCache(pool, namespace="test", engine="toy") as cache:
        engine = cache.engine
        assert isinstance(engine, ToyEngine)
        assert stored_and_fetched(cache, 0, payload(2, SMALL))
        assert engine.written == engine.read == 2 * SMALL
    assert not engine.is_open


@pytest.mark.parametrize(
    ("entry", "saved", "written", "read"),
    [
        ({}, "", 0, 0),  # without sizes, auto never uses it
        ({"write_bytes": 16 << 10, "read_bytes": 16 << 10}, "", 2 * LARGE, 2 * LARGE),
        ({}, "toy-write = 4096", 2 * LARGE, 0),
        ({"write_bytes": 0, "read_bytes": 0}, "toy-read = 1_000_000", 2 * (LARGE + SMALL), 0),
        ({"read_bytes": 0}, "toy-read = true\ntoy-write = 'all'", 0, 2 * (LARGE + SMALL)),
        ({"read_bytes": 0}, "[copy", 0, 2 * (LARGE + SMALL)),  # a damaged file has no settings
    ],
)
def test_auto_uses_an_engine_from_a_number_of_bytes_on(  # noqa: PLR0917
    pool: Pool,
    server: IndexServer,
    add_toy: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    entry: dict[str, int],
    saved: str,
    written: int,
    read: int,
) -> None:
    add_toy(**entry)
    (tmp_path / "beluga.toml").write_text(f"[copy]\n{saved}\n")
    monkeypatch.setenv("BELUGA_CONFIG", str(tmp_path / "beluga.toml"))
    with KVCache(pool, namespace="test") as cache:
        assert stored_and_fetched(cache, 0, payload(2, LARGE))
        assert stored_and_fetched(cache, 2, payload(2, SMALL))
        engine = cache.engine or ToyEngine(pool)
        assert isinstance(engine, ToyEngine)
        assert (engine.written, engine.read) == (written, read)
    found = engine_facts(pool, 1)["toy"]
    assert (found.written is None) == (written == 0)
    assert found.measured == ("= 4096" in saved or "000" in saved)
    line = pool_command._engines({"toy": found})
    assert ("never written" in line) == (written == 0)


def test_a_registered_engines_name_is_listed_everywhere(
    pool: Pool, server: IndexServer, add_toy: Callable[..., None]
) -> None:
    add_toy()
    assert engine_names() == ("auto", "cpu", "dsa", "cuda", "toy")
    with pytest.raises(EngineUnavailableError, match=r"use auto, cpu, dsa, cuda, toy$"):
        KVCache(pool, namespace="test", engine="tow")
    assert settings_of(PoolSettings, {"engine": "toy"}).engine == "toy"
    with pytest.raises(ConnectorError, match=r"must be auto or cpu or dsa or toy$"):
        settings_of(PoolSettings, {"engine": "tow"})
    add_toy(why_none=lambda: "nobody has wound it up", write_bytes=0)
    with pytest.raises(ConnectorError, match="engine is toy, but nobody has wound it up"):
        settings_of(PoolSettings, {"engine": "toy"})
    assert choose_engine(pool, "auto", 1) == EngineChoice()
    assert engine_facts(pool, 1)["toy"].why_none == "nobody has wound it up"


def test_without_a_dsa_the_cpu_copies(pool: Pool, server: IndexServer) -> None:
    if ENGINES["dsa"].why_none() is None:
        pytest.skip("there is a DSA")
    for name in ("auto", "cpu"):
        with KVCache(pool, namespace="test", engine=name) as cache:
            assert cache.engine is None
    with pytest.raises(EngineUnavailableError, match="DSA"):
        choose_engine(pool, "dsa", 1)
    mine = CpuEngine(pool, 1)
    assert choose_engine(pool, mine, 1) == EngineChoice(mine)
    found = engine_facts(pool, 1)["dsa"]
    assert (found.device, found.why_none is None) == (None, False)


@pytest.mark.parametrize("linked", [False, True], ids=["alone", "linked"])
def test_small_batches_use_the_cpu_and_large_ones_the_dsa(
    pool: Pool, server: IndexServer, cache: KVCache, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    link = LinkSettings() if linked else None
    small, large = payload(2, SMALL), payload(3, LARGE)
    with KVCache(pool, namespace="test", link=link, threads=2) as chosen:
        engine = chosen._choice.engine
        assert isinstance(engine, DsaEngine)
        assert stored_and_fetched(chosen, 0, small)
        assert engine.stat.descriptors == 0  # C did it
        assert stored_and_fetched(chosen, 2, large)
        assert engine.stat.descriptors > 0
        if linked:
            carried = chosen.transfer_stats()
            for kind in (TransferClass.OFFLOAD, TransferClass.ONBOARD):
                assert carried[kind].bytes == small.nbytes + large.nbytes
    assert fetched(cache, 0, small)
    assert fetched(cache, 2, large)


@pytest.mark.parametrize("pool", ["hardware"], indirect=True)  # a stall takes seconds
@pytest.mark.parametrize(
    ("opened", "fault"),
    [
        (stand_in.refusing, "the device fails most descriptors, which the CPU then executes"),
        (stand_in.silent, "has completed nothing for 0.3 s"),
    ],
)
def test_the_cpu_copies_after_the_dsa_failed(  # noqa: PLR0917
    pool: Pool,
    server: IndexServer,
    cache: KVCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    opened: Callable[[Pool], DsaEngine],
    fault: str,
) -> None:
    stand_in.install(monkeypatch, opened)
    monkeypatch.setattr(dsa, "_STALL_S", 0.3)
    blocks = payload(6, LARGE)
    with KVCache(pool, namespace="test") as chosen, caplog.at_level(logging.WARNING):
        for index in range(6):
            assert stored_and_fetched(chosen, index, blocks[index : index + 1])
        assert chosen.engine is None
        assert fault in (chosen.engine_fault or "")
    assert fetched(cache, 0, blocks)
    (record,) = caplog.records
    assert "is disabled, the CPU copies: " in record.getMessage()
    # An engine that was asked for by name is not replaced
    if opened is stand_in.silent:
        with (
            KVCache(pool, namespace="test", engine="dsa") as named,
            pytest.raises(Exception, match="completed nothing"),
        ):
            named.put(digests(1, start=9), blocks[:1])


def broken(pool: Pool) -> DsaEngine:
    raise RuntimeError("as no engine should")


def test_the_cpu_copies_if_the_dsa_does_not_open(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second queue is found through sysfs and its device file, as on a machine with a DSA."""
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        stand_in.install(patch, broken)
        assert choose_engine(pool, "auto", 1) == EngineChoice()
    assert "the CPU copies without dsa: as no engine should" in caplog.text
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
    monkeypatch.setattr(dsa, "work_queues", lambda *_: queues)
    opened = functools.partial(open_device, sysfs=tmp_path / "sys", devices=tmp_path / "dev")
    monkeypatch.setattr(dsa, "open_device", opened)
    with caplog.at_level(logging.WARNING):
        assert choose_engine(pool, "auto", 1) == EngineChoice()
    assert "wq0.0: No such file or directory; give this user the device file" in caplog.text
    with pytest.raises(EngineUnavailableError, match="No such file"):
        choose_engine(pool, "dsa", 1)
    assert "No such file" in str(engine_facts(pool, 1)["dsa"].why_none)
