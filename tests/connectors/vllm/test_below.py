# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Requests whose blocks are in a tier below the pool: vLLM waits for them for a limited time."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.blocks import eventually
from support.memory_tier import MemoryTier, served
from vllm_parts import BLOCK_TOKENS, no_extra_keys, request

from beluga import KVCache, Namespace, Pool
from beluga.connectors.connection import Connection
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.lookups import Lookups, Worth
from beluga.connectors.vllm.schedule import Schedule
from beluga.connectors.vllm.settings import VllmSettings

RANKS = tuple(Namespace({"rank": rank}) for rank in range(2))
TOKENS = list(range(100, 100 + 5 * BLOCK_TOKENS + 1))  # five blocks and a token


def sunk(directory: Path, made: Any) -> MemoryTier:
    """Return a tier that has a request's five blocks for each rank."""
    tier = MemoryTier()
    with served(directory / "first", tier) as pool:
        for rank in RANKS:
            with KVCache(pool, namespace=rank) as cache:
                cache.put(list(made.block_hashes[:5]), np.ones((5, 4096), np.uint8))
        assert eventually(lambda: len(tier.blocks) == 10)
    return tier


@contextlib.contextmanager
def looking(path: Path, **changes: Any) -> Iterator[tuple[VllmSettings, Lookups]]:
    settings = VllmSettings(pool=str(path), timeout_ms=500, **changes)
    connection = Connection(settings, name="lookups", logger=logging.getLogger("test"))
    try:
        assert connection.wait(60)
        lookups = Lookups(connection, ConnectorCounters())
        lookups.ranks = RANKS
        yield settings, lookups
    finally:
        connection.close()


def schedule(settings: VllmSettings, lookups: Lookups) -> Schedule:
    return Schedule(
        settings,
        lookups,
        ConnectorCounters(),
        block_size=BLOCK_TOKENS,
        block_count=16,
        block_ids_of=lambda _: [],
        extra_keys_of=no_extra_keys,
    )


def matched_once_fetched(scheduler: Schedule, made: Any) -> int:
    matches: list[int | None] = []

    def answered() -> bool:
        matches.append(scheduler.matched_tokens(made, 0)[0])
        return matches[-1] is not None

    assert eventually(answered)
    assert matches[0] is None, "the blocks were not in the pool yet"
    assert matches[-1] is not None
    return matches[-1]


def test_a_request_waits_for_blocks_below_the_pool(shm: Path) -> None:
    made = request("r", TOKENS)
    tier = sunk(shm, made)
    with served(shm / "pool", tier), looking(shm / "pool") as (settings, lookups):
        assert matched_once_fetched(schedule(settings, lookups), made) == 5 * BLOCK_TOKENS


def test_a_request_does_not_wait_if_waiting_is_disabled(shm: Path) -> None:
    made = request("r", TOKENS)
    tier = sunk(shm, made)
    with served(shm / "pool", tier), looking(shm / "pool", onboard_ms=0) as (settings, lookups):
        assert schedule(settings, lookups).matched_tokens(made, 0) == (0, False)


def test_a_request_waits_at_most_for_the_configured_time(shm: Path) -> None:
    made = request("r", TOKENS)
    tier = sunk(shm, made)
    tier.open.clear()
    with served(shm / "pool", tier), looking(shm / "pool", onboard_ms=100) as (settings, lookups):
        try:
            started = time.monotonic()
            assert matched_once_fetched(schedule(settings, lookups), made) == 0
            assert time.monotonic() - started >= 0.1
        finally:
            tier.open.set()


def test_blocks_that_turn_out_to_be_lost_are_a_miss(shm: Path) -> None:
    made = request("r", TOKENS)
    tier = sunk(shm, made)
    with served(shm / "pool", tier), looking(shm / "pool") as (settings, lookups):
        copies = dict(list(tier.blocks.items())[:6])
        with KVCache(Pool.open([shm / "pool"]), namespace=RANKS[0]) as cache:
            first = [
                tuple(int(word) for word in key) for key in cache.keys(list(made.block_hashes[:5]))
            ]
        lost = first[3]
        del tier.blocks[lost], copies
        assert matched_once_fetched(schedule(settings, lookups), made) == 3 * BLOCK_TOKENS


def test_blocks_that_are_faster_to_compute_are_not_fetched(shm: Path) -> None:
    made = request("r", TOKENS)
    tier = sunk(shm, made)
    costs = {"prefill_b_ms": 1e-6}
    with served(shm / "pool", tier), looking(shm / "pool", **costs) as (settings, lookups):
        scheduler = schedule(settings, lookups)
        # only the first one is measured
        assert matched_once_fetched(scheduler, made) == 5 * BLOCK_TOKENS
        worth = Worth(settings, BLOCK_TOKENS)
        assert worth.pays(0, 5)
        worth.took(5, 0.1)
        assert not worth.pays(0, 5)
        cheap = Worth(VllmSettings(), BLOCK_TOKENS)
        cheap.took(5, 0.1)
        assert cheap.pays(0, 5)


def test_an_invalid_wait_time_is_rejected() -> None:
    from beluga.errors import ConnectorError

    with pytest.raises(ConnectorError, match="onboard_ms"):
        VllmSettings(onboard_ms=-1)
