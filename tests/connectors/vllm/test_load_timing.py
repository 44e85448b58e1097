# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``load: auto``: no forward waits for more than a few milliseconds of loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_parts import BLOCK_TOKENS, request

from beluga import IndexServer, KVCache
from beluga.connectors.vllm.load_timing import IDLE_LIMIT_S, LIMIT_S, LoadTiming
from beluga.connectors.vllm.steps import Loaded, StepReport
from tests.connectors.vllm.test_schedule import RANKS, TOKENS, Engine, pinned, store

MIB = 1 << 20


class Rule(LoadTiming):
    """The rule while other requests compute."""

    def concurrent(self, blocks: int, *, idle: bool = False) -> bool:
        return super().concurrent(blocks, idle=idle)


def timing(load: str = "auto", size: int = MIB) -> Rule:
    return Rule(load, lambda: size)


@pytest.mark.parametrize(("load", "concurrent"), [("sync", False), ("async", True)])
def test_the_other_settings_apply_to_every_load(load: str, concurrent: bool) -> None:
    for blocks, idle in ((1, False), (1000, False), (1, True), (1000, True)):
        assert timing(load).concurrent(blocks, idle=idle) is concurrent


def test_a_load_runs_beside_forwards_if_its_bytes_take_too_long() -> None:
    rule = timing()
    at_once = int(8e9 * LIMIT_S) // MIB  # at the speed that is assumed
    assert not rule.concurrent(at_once)
    assert rule.concurrent(at_once + 1)
    assert not timing(size=MIB // 4).concurrent(4 * at_once)


def test_a_longer_load_may_run_before_a_forward_of_its_request_alone() -> None:
    rule = timing()
    at_once = int(8e9 * IDLE_LIMIT_S) // MIB
    assert rule.concurrent(at_once)
    assert not rule.concurrent(at_once, idle=True)
    assert rule.concurrent(at_once + 1, idle=True)
    rule.planned(at_once)
    assert rule.concurrent(1, idle=True)


def test_the_speed_is_measured_from_earlier_loads() -> None:
    rule = timing()
    rule.took(64, 64 * MIB / 1e9)  # slow memory
    assert not rule.concurrent(3)
    assert rule.concurrent(4)
    for _ in range(100):
        rule.took(64, 64 * MIB / 32e9)
    assert not rule.concurrent(100)


def test_small_loads_do_not_change_the_measured_speed() -> None:
    """They take as long as a call, or as a thread that is not scheduled."""
    rule = timing(size=4096)
    rule.took(8, 0.5)
    assert not rule.concurrent(1000)


def test_the_loads_of_one_forward_have_one_limit() -> None:
    rule = timing()
    half = int(8e9 * LIMIT_S) // MIB // 2 + 1
    assert not rule.concurrent(half)
    rule.planned(half)
    assert rule.concurrent(half)
    rule.began()
    assert not rule.concurrent(half)


@pytest.fixture
def engine(server: IndexServer, pool_name: str) -> Iterator[Engine]:
    engine = Engine(pool_name)  # with the default settings
    engine.lookups.block_bytes = 8 * MIB
    assert engine.connection.wait(60)
    engine.schedule.orders({"other": 1}, [])  # another request decodes
    yield engine
    engine.connection.close()


@pytest.fixture
def caches(server: IndexServer, engine: Engine, pool: Any) -> Iterator[list[KVCache]]:
    made = [KVCache(pool, namespace=rank) for rank in RANKS]
    yield made
    for cache in made:
        cache.close()


def prompts(caches: list[KVCache], *counts: int) -> list[Any]:
    """Return requests that have that many blocks in the pool."""
    made = []
    for number, count in enumerate(counts):
        reply = request(f"r{number}", [number * 1000 + token for token in TOKENS])
        store(caches, reply, count, count)
        made.append(reply)
    return made


def test_the_same_load_runs_before_a_forward_once_nothing_else_computes(
    engine: Engine, caches: list[KVCache]
) -> None:
    first, second, third = prompts(caches, 5, 5, 5)
    assert engine.start(first) == 5 * BLOCK_TOKENS
    assert [
        load.concurrent for load in engine.schedule.orders({"other": 1, "r0": 1}, []).loads
    ] == [True]
    engine.schedule.finished(request("other", TOKENS), [])
    assert engine.schedule.matched_tokens(second, 0) == (5 * BLOCK_TOKENS, True)
    engine.schedule.finished(first, engine.blocks["r0"])
    assert engine.schedule.matched_tokens(third, 0) == (5 * BLOCK_TOKENS, False)


def test_short_loads_delay_the_forward_and_long_loads_overlap_with_it(
    engine: Engine, caches: list[KVCache]
) -> None:
    short, long, late = prompts(caches, 2, 5, 1)
    for waiting in (short, long, late):
        engine.start(waiting)
    orders = engine.schedule.orders({}, [])
    assert [(load.request, load.concurrent) for load in orders.loads] == [
        ("r0", False),
        ("r1", True),
        ("r2", False),
    ]


def test_many_short_loads_do_not_add_up_to_a_long_pause(
    engine: Engine, caches: list[KVCache]
) -> None:
    made = prompts(caches, 2, 2, 2)
    for waiting in made:
        engine.start(waiting)
    assert [load.concurrent for load in engine.schedule.orders({}, []).loads] == [False, True, True]


def test_async_loads_measure_the_speed_for_later_ones(
    engine: Engine, caches: list[KVCache]
) -> None:
    first, second = prompts(caches, 5, 5)
    assert engine.schedule.matched_tokens(first, 0) == (5 * BLOCK_TOKENS, True)
    engine.schedule.allocated(first, list(range(10)), 5 * BLOCK_TOKENS)
    report = StepReport({"r0": Loaded(1, 5, 0.0001)})
    report.add(StepReport({"r0": Loaded(1, 5, 0.001)}))  # the slowest rank determines the time
    engine.schedule.reported(report, set())
    assert pinned(caches) == 0
    assert engine.schedule.matched_tokens(second, 0) == (5 * BLOCK_TOKENS, False)


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_request_that_ends_during_an_async_load_releases_its_pins(
    engine: Engine, caches: list[KVCache], end: str
) -> None:
    (made,) = prompts(caches, 5)
    assert engine.start(made) == 5 * BLOCK_TOKENS
    assert engine.schedule.orders({}, []).loads[0].concurrent
    if end == "abort":
        assert not engine.schedule.finished(made, engine.blocks["r0"])
        assert pinned(caches) == 0
        engine.loaded("r0")  # the ranks still report it
        assert not engine.schedule.pending
        return
    made.num_computed_tokens = 0
    engine.schedule.orders({}, ["r0"])
    engine.lookups.block_bytes = MIB  # the next load is short
    assert engine.schedule.matched_tokens(made, 0) == (5 * BLOCK_TOKENS, False)
    engine.schedule.allocated(made, engine.blocks["r0"], 5 * BLOCK_TOKENS)
    assert [load.concurrent for load in engine.schedule.orders({}, []).loads] == [False]


def test_orders_have_the_offset_of_each_ranks_part_of_a_block(
    engine: Engine, caches: list[KVCache]
) -> None:
    (made,) = prompts(caches, 5)
    tokens, _ = engine.schedule.matched_tokens(made, BLOCK_TOKENS)
    engine.schedule.allocated(made, list(range(10)), 3 * BLOCK_TOKENS)  # vLLM requests fewer tokens
    assert tokens == 4 * BLOCK_TOKENS
    (load,) = engine.schedule.orders({}, []).loads
    for part, cache in enumerate(caches):
        pins = cache.pin(made.block_hashes[1:4])
        records = load.located(part)
        assert records is not None
        assert (records == pins.records()).all()
        cache.release(pins)


def test_an_order_without_pins_has_no_offsets(
    engine: Engine, caches: list[KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = prompts(caches, 3)
    engine.schedule.matched_tokens(made, 0)
    engine.schedule._unpin(engine.schedule._requests["r0"])
    engine.schedule.allocated(made, list(range(10)), 3 * BLOCK_TOKENS)
    assert engine.schedule.orders({}, []).loads[0].located(0) is None
