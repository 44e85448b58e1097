# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks that are staged without cupy: copies are ordered with the engine's computations on
them.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch_streams import Machine
from vllm_parts import layer_major

from beluga import IndexServer, Namespace
from beluga.connectors.vllm import staging as device
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.steps import BlockRange, Orders
from beluga.connectors.vllm.worker import RankWorker
from beluga.errors import EngineUnavailableError

BLOCKS, LAYERS, ITEMS = 12, 3, 256
IDS = [7, 2, 5]
DIGESTS = b"".join(bytes([i + 1]) * 32 for i in IDS)
LONG_S = 60.0


class Rank:
    """A worker whose blocks are on an accelerator that only torch can reach."""

    def __init__(self, machine: Machine, pool_name: str, load: str) -> None:
        tensors, self.memory = layer_major(LAYERS, BLOCKS, ITEMS)
        for tensor in tensors.values():
            tensor.device = SimpleNamespace(type="cuda", index=0)
        layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes={})
        settings = VllmSettings(pool=pool_name, timeout_ms=5000, load=load)
        self.worker = RankWorker(
            settings, layout, Namespace.of("staged"), ConnectorCounters(), logging.getLogger("test")
        )
        assert self.worker.load_connection.wait(LONG_S)
        assert self.worker.save_connection.wait(LONG_S)
        self.engine = machine.engine

    def compute(self, value: int) -> None:
        """Queue a write of every block on the engine's stream."""
        self.engine.put(lambda: self.memory.fill(value))

    def blocks(self) -> Any:
        """Return the bytes after everything on the engine's stream."""
        self.engine.synchronize()
        return self.memory[:, IDS]

    def save(self) -> None:
        self.worker.save(Orders(saves=[BlockRange("r", DIGESTS, IDS)]))
        _wait_until(lambda: "r" in self.worker.saves.ended({"r"}))

    def load(self) -> None:
        self.worker.load(Orders(loads=[BlockRange("s", DIGESTS, IDS)]))
        _wait_until(lambda: "s" in self.worker.loads.loaded())
        assert self.worker.loads.failed() == set()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(params=["sync", "async"])
def rank(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    server: IndexServer,
    pool_name: str,
) -> Iterator[Rank]:
    def missing(_: int) -> None:
        raise EngineUnavailableError("made up")

    machine = Machine()
    monkeypatch.setitem(sys.modules, "torch", machine.module())
    monkeypatch.setattr(device, "CupyDriver", missing)
    rank = Rank(machine, pool_name, request.param)
    yield rank
    rank.worker.close()


def test_a_load_waits_for_the_engines_work_on_the_blocks(rank: Rank) -> None:
    rank.compute(3)
    rank.save()
    rank.compute(7)  # a running step uses blocks that are given to another request
    rank.load()
    assert (rank.blocks() == 3).all()


def test_a_step_after_a_load_overwrites_its_bytes(rank: Rank) -> None:
    rank.compute(3)
    rank.save()
    rank.load()
    rank.compute(9)
    assert (rank.blocks() == 9).all()


def test_a_save_reads_the_results_of_the_previous_step_only(rank: Rank) -> None:
    rank.compute(4)
    rank.save()
    rank.compute(8)
    assert (rank.blocks() == 8).all()
    rank.load()
    assert np.array_equal(rank.blocks(), np.full((LAYERS, len(IDS), ITEMS), 4))


def test_a_buffer_serves_batches_of_any_size_one_after_the_other(rank: Rank) -> None:
    rank.memory[:] = np.arange(BLOCKS, dtype=np.uint16)[None, :, None]
    wanted = rank.memory.copy()
    for ids in ([1], [2, 3, 4, 5], [6, 7], [8, 9, 10, 11]):
        name = str(ids)
        digests = b"".join(bytes([100 + i]) * 32 for i in ids)
        rank.worker.save(Orders(saves=[BlockRange(name, digests, ids)]))
        _wait_until(lambda name=name: name in rank.worker.saves.ended({name}))  # type: ignore[misc]
        rank.memory[:, ids] = 99
        rank.worker.load(Orders(loads=[BlockRange(name, digests, ids)]))
        _wait_until(lambda name=name: name in rank.worker.loads.loaded())  # type: ignore[misc]
    assert np.array_equal(rank.memory[:, 1:], wanted[:, 1:])
    assert not rank.memory[:, 0].any()
