# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The scheduler's side: which blocks are looked up, loaded and saved, and which never are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.blocks import eventually
from vllm_parts import BLOCK_TOKENS, adapter, extend, no_extra_keys, request

from beluga import IndexServer, KVCache, Namespace
from beluga.connectors.connection import Connection
from beluga.connectors.identity import Files
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.events import Announcements
from beluga.connectors.vllm.lookups import Lookups
from beluga.connectors.vllm.schedule import Schedule
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.steps import Loaded, Orders, StepReport, StoredCounts

RANKS = tuple(Namespace({"rank": rank}) for rank in range(2))
BLOCKS = 200  # blocks per engine
TOKENS = list(range(100, 100 + 5 * BLOCK_TOKENS + 1))  # five blocks and a token
LONG_S = 60.0


class Engine:
    """A schedule with two ranks, and the engine's record of its requests' blocks."""

    def __init__(self, pool_name: str, **changes: Any) -> None:
        settings = VllmSettings(pool=pool_name, timeout_ms=500, retry_s=0.05, **changes)
        self.connection = Connection(settings, name="lookups", logger=logging.getLogger("test"))
        self.counters = ConnectorCounters()
        self.lookups = Lookups(self.connection, self.counters)
        self.lookups.ranks = RANKS
        self.blocks: dict[str, list[int]] = {}
        self.announcements = Announcements(rank_count=lambda: len(RANKS), block_size=BLOCK_TOKENS)
        self.schedule = Schedule(
            settings,
            self.lookups,
            self.counters,
            block_size=BLOCK_TOKENS,
            block_count=BLOCKS,
            block_ids_of=lambda name: self.blocks.get(name, []),
            extra_keys_of=no_extra_keys,
            announcements=self.announcements,
        )

    def start(self, made: Any, *, computed: int = 0) -> int:
        """Start a request. Returns the tokens that it loads."""
        tokens, _ = self.schedule.matched_tokens(made, computed)
        first = 10 * (len(self.blocks) + 1)
        self.blocks.setdefault(made.request_id, list(range(first, first + 10)))
        self.schedule.allocated(made, self.blocks[made.request_id], tokens)
        made.num_computed_tokens = computed + tokens
        return tokens

    def step(self, made: Any, tokens: int, preempted: tuple[str, ...] = ()) -> Orders:
        """Run a step that computes that many tokens of a request."""
        orders = self.schedule.orders({made.request_id: tokens}, list(preempted))
        made.num_computed_tokens += tokens
        return orders

    def saves(self, made: Any | None = None, tokens: int = 0) -> list[tuple[str, list[int]]]:
        """Run a step of a request and an empty one, and return what they save."""
        saves = self.step(made, tokens).saves if made is not None else []
        return names(saves + self.schedule.orders({}, []).saves)

    def loaded(
        self,
        name: str,
        ranks: int = len(RANKS),
        invalid: set[int] | None = None,
        *,
        blocks: int = 5,
    ) -> None:
        """Report that that many ranks have each loaded that many leading blocks of a request."""
        self.schedule.reported(StepReport({name: Loaded(ranks, blocks)}), invalid or set())


@pytest.fixture
def engine(server: IndexServer, pool_name: str) -> Iterator[Engine]:
    engine = Engine(pool_name)
    assert engine.connection.wait(60)
    yield engine
    engine.connection.close()


@pytest.fixture
def caches(server: IndexServer, engine: Engine, pool: Any) -> Iterator[list[KVCache]]:
    """A cache for each rank."""
    made = [KVCache(pool, namespace=rank) for rank in RANKS]
    yield made
    for cache in made:
        cache.close()


def store(caches: list[KVCache], made: Any, *counts: int) -> None:
    """Put that many leading blocks of a request for each rank."""
    for cache, count in zip(caches, counts, strict=True):
        cache.put(list(made.block_hashes[:count]), np.ones((count, 4096), dtype=np.uint8))


def names(ranges: list[Any]) -> list[tuple[str, list[int]]]:
    return [(span.request, span.block_ids) for span in ranges]


def test_a_hit_is_what_every_rank_has(engine: Engine, caches: list[KVCache]) -> None:
    made = request("r", TOKENS)
    store(caches, made, 4, 3)
    assert engine.start(made) == 3 * BLOCK_TOKENS
    (load,) = engine.step(made, 9).loads
    assert load.block_ids == [10, 11, 12]
    assert load.packed().tobytes() == b"".join(made.block_hashes[:3])


def test_one_token_is_left_to_compute(engine: Engine, caches: list[KVCache]) -> None:
    made = request("r", TOKENS[: 5 * BLOCK_TOKENS])
    store(caches, made, 5, 5)
    assert engine.start(made) == 4 * BLOCK_TOKENS


def test_only_blocks_missing_in_the_engines_cache_are_loaded(
    engine: Engine, caches: list[KVCache]
) -> None:
    made = request("r", TOKENS)
    store(caches, made, 5, 5)
    assert engine.start(made, computed=2 * BLOCK_TOKENS) == 3 * BLOCK_TOKENS
    assert engine.step(made, 1).loads[0].block_ids == [12, 13, 14]


def test_before_the_ranks_are_known_every_lookup_misses(
    engine: Engine, caches: list[KVCache]
) -> None:
    made = request("r", TOKENS)
    store(caches, made, 5, 5)
    engine.lookups.ranks = ()
    assert engine.start(made) == 0


def test_a_waiting_request_is_looked_up_once_and_its_hits_stay_pinned(
    engine: Engine, caches: list[KVCache]
) -> None:
    made = request("r", TOKENS)
    store(caches, made, 5, 5)
    for _ in range(3):
        assert engine.schedule.matched_tokens(made, 0) == (5 * BLOCK_TOKENS, False)
    assert engine.counters.take()["lookups"] == 1
    assert caches[0].stat().pinned_count == 10


def test_pins_are_released_when_all_ranks_have_loaded(
    engine: Engine, caches: list[KVCache]
) -> None:
    made = request("r", TOKENS)
    store(caches, made, 5, 5)
    engine.start(made)
    engine.step(made, 1)
    engine.loaded("r", ranks=1)
    assert caches[0].stat().pinned_count == 10
    engine.loaded("r", ranks=1)
    assert caches[0].stat().pinned_count == 0


def test_hits_are_what_all_ranks_have_loaded(engine: Engine, caches: list[KVCache]) -> None:
    made = request("r", TOKENS)
    store(caches, made, 5, 5)
    engine.start(made)
    engine.step(made, 1)
    engine.loaded("r", ranks=1, blocks=5)
    assert "hit_tokens" not in engine.counters.take()  # the load was only announced
    engine.loaded("r", ranks=1, blocks=2)
    assert engine.counters.take()["hit_tokens"] == 2 * BLOCK_TOKENS
    dropped = request("dropped", TOKENS)
    engine.start(dropped)
    engine.schedule.finished(dropped, [])
    assert "hit_tokens" not in engine.counters.take()


@pytest.mark.parametrize("when", ["waiting", "refused", "loading"])
def test_pins_are_released_with_the_request(
    engine: Engine, caches: list[KVCache], when: str
) -> None:
    made = request("r", TOKENS)
    store(caches, made, 5, 5)
    engine.schedule.matched_tokens(made, 0)
    assert caches[0].stat().pinned_count == 10
    if when == "refused":  # vLLM has decided not to load
        engine.schedule.allocated(made, list(range(10)), 0)
    if when == "loading":
        engine.schedule.allocated(made, list(range(10)), 5 * BLOCK_TOKENS)
    engine.schedule.finished(made, [])
    assert caches[0].stat().pinned_count == 0


def test_blocks_are_saved_with_the_step_after_the_one_that_completes_them(engine: Engine) -> None:
    made = request("r", TOKENS)
    assert engine.start(made) == 0
    assert engine.step(made, 6).saves == []
    assert names(engine.step(made, 3).saves) == [("r", [10])]
    assert names(engine.step(made, 12).saves) == [("r", [11])]
    assert engine.schedule.pending  # so that vLLM runs one more step
    assert engine.saves() == [("r", [12, 13, 14])]
    assert not engine.schedule.pending
    assert engine.saves(made, 1) == []


def test_generated_tokens_are_saved_once_accepted(engine: Engine) -> None:
    made = request("r", TOKENS[:BLOCK_TOKENS])
    engine.start(made)
    assert engine.saves(made, BLOCK_TOKENS) == [("r", [10])]
    for token in range(BLOCK_TOKENS):
        # the hash of draft tokens is also unknown before
        assert engine.saves(made, 1) == []
        extend(made, [token])
    assert engine.saves(made, 1) == [("r", [11])]


def test_loaded_blocks_are_not_saved(engine: Engine, caches: list[KVCache]) -> None:
    made = request("r", TOKENS)
    store(caches, made, 4, 4)
    engine.start(made, computed=BLOCK_TOKENS)
    engine.step(made, 4)
    engine.loaded("r")
    assert engine.saves(made, 1) == [("r", [10]), ("r", [14])]


def test_nothing_is_saved_before_its_step_is_processed(engine: Engine) -> None:
    """vLLM may schedule further steps before. The first output shows how the loads ended."""
    made = request("r", TOKENS)
    engine.start(made, computed=3 * BLOCK_TOKENS)  # the rest was loaded by another connector
    engine.step(made, 4)
    made.num_in_flight_tokens = 4
    assert engine.step(made, 4).saves == []
    made.num_in_flight_tokens = 8
    assert engine.saves() == []
    made.num_in_flight_tokens = 4
    assert engine.saves() == [("r", [10, 11, 12, 13])]
    made.num_in_flight_tokens = 0
    assert engine.saves() == [("r", [14])]


def test_blocks_of_another_connectors_failed_load_are_saved_once_computed(
    engine: Engine,
) -> None:
    made, sharer, other = request("r", TOKENS), request("s", TOKENS), request("o", TOKENS[::-1])
    engine.start(made, computed=3 * BLOCK_TOKENS)
    engine.blocks["s"] = [10, 11, 12, 77, 78, 79]  # the engine's own cache gave it the same blocks
    engine.start(sharer, computed=3 * BLOCK_TOKENS)
    engine.start(other)
    scheduled = {"r": 9, "s": 9, "o": BLOCK_TOKENS}
    assert engine.schedule.orders(scheduled, []).saves == []
    for computing in (made, sharer, other):
        computing.num_computed_tokens += scheduled[computing.request_id]
    engine.schedule.reported(None, {11})
    made.num_computed_tokens = BLOCK_TOKENS  # vLLM returns to valid tokens
    sharer.num_computed_tokens = 3 * BLOCK_TOKENS
    assert engine.saves() == [("r", [10]), ("s", [10]), ("o", [30])]
    assert engine.saves(sharer, 9) == []  # it computes on block 11 before this is right
    assert engine.saves(made, 17) == [("r", [11, 12, 13, 14])]


@pytest.mark.parametrize("aborted", [False, True])
def test_blocks_computed_on_a_failed_load_are_never_saved(engine: Engine, aborted: bool) -> None:
    """vLLM leaves the blocks in its own cache, and computes them again if it still has to."""
    made = request("r", TOKENS)
    engine.start(made, computed=3 * BLOCK_TOKENS)
    engine.step(made, 9)
    engine.schedule.reported(None, {11, 12})
    made.num_computed_tokens = BLOCK_TOKENS
    assert engine.saves() == [("r", [10])]
    if aborted:
        engine.schedule.finished(made, engine.blocks["r"])
        assert not engine.schedule.pending
    late = request("late", TOKENS)
    engine.blocks["late"] = [10, 11, 12, 13]
    engine.start(late, computed=4 * BLOCK_TOKENS)
    assert engine.saves(late, 1) == [("late", [10])]
    engine.blocks["late"] += [90, 91]  # more blocks with a later step
    assert engine.saves(late, 4) == []
    after = request("after", TOKENS)
    engine.blocks["after"] = [50, 51, 52, 53, 90, 99]  # only this one is of the late request
    engine.start(after, computed=5 * BLOCK_TOKENS)
    assert engine.saves(after, 1) == [("after", [50, 51, 52, 53])]
    anew = request("anew", TOKENS)
    engine.blocks["anew"] = [20, 11, 12, 13, 90, 99]  # blocks that were given to it are its own
    engine.start(anew)
    assert engine.saves(anew, 21) == [("anew", [20, 11, 12, 13, 90])]


def test_blocks_of_a_load_that_another_connector_reports_late_are_offered_again(
    engine: Engine,
) -> None:
    """vLLM computes them again, whenever a connector reports them."""
    made = request("r", TOKENS)
    engine.start(made)
    assert engine.saves(made, 3 * BLOCK_TOKENS) == [("r", [10, 11, 12])]
    engine.schedule.reported(None, {11})
    made.num_computed_tokens = BLOCK_TOKENS
    assert engine.saves() == []
    assert engine.saves(made, 4 * BLOCK_TOKENS) == [("r", [11, 12, 13, 14])]


@pytest.mark.parametrize("order", ["rst", "tsr"])
def test_unverified_blocks_stay_unverified_in_requests_that_share_them(
    engine: Engine, order: str
) -> None:
    """Two blocks may have one hash. Then a request finds one block here and the next one there."""
    made, sharer, third = (request(name, TOKENS) for name in ("r", "s", "t"))
    engine.blocks["r"] = [*range(10, 20)]
    engine.blocks["s"] = [70, 11, 72, 73, 74, 75]
    engine.blocks["t"] = [80, 81, 72, 83, 84, 85]
    starts = {"r": (made, 1), "s": (sharer, 2), "t": (third, 3)}
    for name in order:
        first, blocks = starts[name]
        engine.start(first, computed=blocks * BLOCK_TOKENS)
    engine.schedule.orders({"r": 4, "s": 4, "t": 4}, [])
    for computing in (made, sharer, third):
        computing.num_computed_tokens += 4
    engine.schedule.reported(None, {10})
    made.num_computed_tokens = 0
    assert sorted(engine.saves()) == [("s", [70]), ("t", [80, 81])]


def test_a_request_that_ends_with_the_step_of_a_failed_load_saves_nothing(engine: Engine) -> None:
    """vLLM calls ``request_finished`` before it passes on what the same step failed to load."""
    made = request("r", TOKENS)
    engine.start(made, computed=3 * BLOCK_TOKENS)
    engine.step(made, 9)
    assert engine.schedule.finished(made, engine.blocks["r"])
    engine.schedule.reported(None, {10})
    assert engine.saves() == [("r", [])]  # only makes the workers report the request's end


def test_a_request_that_ends_while_another_connector_loads_saves_nothing(engine: Engine) -> None:
    """Its blocks count as computed before the bytes arrive."""
    made = request("r", TOKENS)
    engine.start(made, computed=3 * BLOCK_TOKENS)
    assert not engine.schedule.finished(made, engine.blocks["r"])
    again = request("again", TOKENS)
    engine.start(again)
    engine.step(again, 21)
    engine.saves()
    again.num_computed_tokens = 0  # preempted
    engine.start(again, computed=3 * BLOCK_TOKENS)
    engine.schedule.finished(again, engine.blocks["again"])
    assert engine.saves() == []


def test_after_a_failed_load_a_request_is_saved_without_a_lookup(
    engine: Engine, caches: list[KVCache]
) -> None:
    made = request("r", TOKENS)
    store(caches, made, 3, 3)
    engine.start(made)
    engine.step(made, 9)
    made.num_computed_tokens = BLOCK_TOKENS  # vLLM returns to valid tokens
    engine.loaded("r", invalid={11, 12}, blocks=1)
    assert engine.saves(made, 17) == [("r", [11, 12, 13, 14])]
    assert engine.schedule.matched_tokens(made, 0) == (0, False)


def test_blocks_with_nans_are_not_saved(engine: Engine) -> None:
    made, sharer = request("r", TOKENS), request("s", TOKENS)
    engine.start(made)
    assert engine.saves(made, 6) == [("r", [10])]
    engine.step(made, 1)
    made.num_nans_in_logits = 3
    assert engine.saves() == []
    engine.step(made, 14)
    made.num_nans_in_logits = 0
    assert engine.saves() == []
    engine.blocks["s"] = [10, 11, 12, 77, 78, 79]
    engine.start(sharer, computed=3 * BLOCK_TOKENS)
    assert engine.saves(sharer, 9) == [("s", [10])]


def test_cached_blocks_of_a_request_with_nans_are_not_saved(engine: Engine) -> None:
    made, sharer = request("r", TOKENS), request("s", TOKENS)
    engine.start(made)
    engine.step(made, 21)
    made.num_nans_in_logits = 3
    assert engine.schedule.finished(made, engine.blocks["r"])
    assert engine.saves() == [("r", [])]
    engine.blocks["s"] = [10, 11, 12, 77, 78, 79]
    engine.start(sharer, computed=3 * BLOCK_TOKENS)
    assert engine.saves(sharer, 9) == []


def test_the_last_blocks_are_saved_when_a_request_ends(
    engine: Engine, caches: list[KVCache]
) -> None:
    """It computes its only token after a hit, as a remote prefill does."""
    made = request("r", TOKENS)
    store(caches, made, 3, 3)
    engine.start(made)
    engine.step(made, 9)
    assert engine.schedule.finished(made, engine.blocks["r"])  # vLLM reports the load after this
    engine.loaded("r")
    assert engine.schedule.pending
    assert engine.saves() == [("r", [13, 14])]
    assert not engine.schedule.pending
    assert engine.saves() == []


def test_tokens_in_flight_are_not_saved_when_a_request_ends(engine: Engine) -> None:
    made = request("r", TOKENS)
    engine.start(made)
    engine.step(made, 7)
    made.num_in_flight_tokens = 7
    engine.step(made, 5)
    made.num_in_flight_tokens = 5
    assert engine.schedule.finished(made, engine.blocks["r"])
    assert engine.saves() == [("r", [10])]
    assert not engine.schedule.pending
    made.num_in_flight_tokens = 0
    assert engine.saves() == []


def test_blocks_are_released_at_once_without_pending_saves(engine: Engine) -> None:
    made = request("r", TOKENS[:3])
    engine.start(made)
    engine.step(made, 3)
    assert not engine.schedule.finished(made, engine.blocks["r"])


def test_a_preempted_request_is_looked_up_again(engine: Engine, caches: list[KVCache]) -> None:
    made = request("r", TOKENS)
    engine.start(made)
    engine.step(made, 8)
    made.num_computed_tokens = 0
    orders = engine.schedule.orders({}, ["r"])
    assert (orders.preempted, orders.saves) == (["r"], [])
    store(caches, made, 1, 1)
    engine.blocks["r"] = list(range(50, 60))
    assert engine.start(made) == BLOCK_TOKENS
    engine.step(made, 4)
    engine.loaded("r")
    assert engine.saves(made, 4) == [("r", [51]), ("r", [52])]


def test_a_read_only_engine_saves_nothing(server: IndexServer, pool_name: str) -> None:
    engine = Engine(pool_name, save=False)
    made = request("r", TOKENS)
    engine.start(made)
    assert engine.saves(made, 21) == []
    assert not engine.schedule.finished(made, engine.blocks["r"])
    assert not engine.schedule.pending
    engine.connection.close()


def test_asynchronous_loads_do_not_delay_saves(
    server: IndexServer, pool_name: str, caches: list[KVCache]
) -> None:
    engine = Engine(pool_name, load="async")
    assert engine.connection.wait(60)
    other, made = request("o", TOKENS[::-1]), request("r", TOKENS)
    store(caches, made, 3, 3)
    engine.start(other)
    assert engine.schedule.matched_tokens(made, 0) == (3 * BLOCK_TOKENS, True)
    engine.blocks["r"] = list(range(70, 80))
    engine.schedule.allocated(made, engine.blocks["r"], 3 * BLOCK_TOKENS)
    orders = engine.step(other, BLOCK_TOKENS)
    assert names(orders.loads) == [("r", [70, 71, 72])]
    assert engine.saves() == [("o", [10])]
    engine.loaded("r")
    assert caches[0].stat().pinned_count == 0
    engine.schedule.allocated(made, engine.blocks["r"], 0)  # vLLM calls again after the load
    made.num_computed_tokens = 3 * BLOCK_TOKENS
    assert engine.saves(made, 9) == [("r", [73, 74])]
    engine.connection.close()


def test_after_a_reset_an_engine_has_a_separate_namespace(
    engine: Engine, caches: list[KVCache]
) -> None:
    before, under_way = request("r", TOKENS), request("u", TOKENS[::-1])
    store(caches, before, 5, 5)
    engine.start(under_way)
    engine.step(under_way, 9)
    ended = request("e", [9] * 21)
    engine.start(ended)
    engine.step(ended, 21)
    assert engine.schedule.finished(ended, engine.blocks["e"])
    engine.schedule.matched_tokens(before, 0)
    engine.schedule.reset()
    assert caches[0].stat().pinned_count == 0
    assert engine.saves(under_way, 12) == [("e", [])]
    stale = request("stale", TOKENS[::-1])  # vLLM's own cache was not emptied: it has blocks in use
    engine.blocks["stale"] = [10, 11, 80, 81, 82]
    engine.start(stale, computed=2 * BLOCK_TOKENS)
    assert engine.saves(stale, 13) == []
    after = request("s", TOKENS)
    assert engine.start(after) == 0
    engine.step(after, 21)
    (save,) = engine.schedule.orders({}, []).saves
    assert save.packed().tobytes() != b"".join(after.block_hashes)
    again = request("t", TOKENS)
    for cache in caches:
        cache.put(save.packed(), np.ones((5, 4096), dtype=np.uint8))
    assert engine.start(again) == 5 * BLOCK_TOKENS


def test_without_a_server_everything_is_a_miss(pool_name: str) -> None:
    engine = Engine(pool_name)
    made = request("r", TOKENS)
    assert engine.start(made) == 0
    assert engine.saves(made, 21) == [("r", [10, 11, 12, 13, 14])]
    engine.connection.close()


def pinned(caches: list[KVCache]) -> int:
    return caches[0].stat().pinned_count


def test_a_loaded_request_is_looked_up_again_when_it_restarts(
    engine: Engine, caches: list[KVCache]
) -> None:
    made = request("r", TOKENS)
    store(caches, made, 5, 5)
    assert engine.start(made) == 5 * BLOCK_TOKENS
    engine.loaded("r")
    assert pinned(caches) == 0
    engine.schedule.orders({"r": 1}, [])
    assert engine.schedule.matched_tokens(made, BLOCK_TOKENS) == (4 * BLOCK_TOKENS, False)
    assert pinned(caches) == 4 * len(RANKS)
    engine.schedule.allocated(made, engine.blocks["r"], 0)  # the engine does not use the hit
    assert pinned(caches) == 0


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_request_whose_load_failed_in_another_connector_is_not_loaded(
    server: IndexServer, pool_name: str, caches: list[KVCache], load: str
) -> None:
    """vLLM would wait forever for blocks that it has reserved for the same request."""
    other = Engine(pool_name, load=load)
    assert other.connection.wait(60)
    made = request("r", TOKENS)
    store(caches, made, 5, 5)
    hit = (5 * BLOCK_TOKENS, load == "async")
    assert other.schedule.matched_tokens(made, 0) == hit
    assert other.schedule.matched_tokens(made, 0) == hit  # it waits for blocks meanwhile
    other.schedule.allocated(made, other.blocks.setdefault("r", [1, 2, 3, 4, 5]), 0)
    other.schedule.orders({}, [])
    assert other.schedule.matched_tokens(made, 0) == (0, False)
    assert pinned(caches) == 0
    other.connection.close()


def test_a_request_without_accepted_tokens_releases_its_pins(
    server: IndexServer, pool_name: str, caches: list[KVCache]
) -> None:
    other = Engine(pool_name, load="async")
    assert other.connection.wait(60)
    made = request("r", TOKENS)
    store(caches, made, 5, 5)
    assert other.schedule.matched_tokens(made, 0) == (5 * BLOCK_TOKENS, True)
    assert pinned(caches) > 0
    other.schedule.allocated(made, [], 0)
    assert pinned(caches) == 0
    other.connection.close()


def test_a_rank_that_is_late_with_one_request_does_not_delay_another(
    engine: Engine, caches: list[KVCache]
) -> None:
    first, second = request("first", TOKENS), request("second", [9] * 21)
    for made in (first, second):
        store(caches, made, 5, 5)
        assert engine.start(made) == 5 * BLOCK_TOKENS
    both = StepReport({"first": Loaded(1, 5), "second": Loaded(2, 5)})
    engine.schedule.reported(both, set())
    assert pinned(caches) == 5 * len(RANKS)  # the pins of the first request
    engine.loaded("first", ranks=1)
    assert pinned(caches) == 0


def test_before_the_ranks_are_known_everything_is_a_miss(
    engine: Engine, caches: list[KVCache]
) -> None:
    made = request("r", TOKENS)
    store(caches, made, 5, 5)
    engine.lookups.ranks = ()
    assert engine.schedule.matched_tokens(made, 0) == (0, False)
    engine.lookups.ranks = RANKS
    assert engine.schedule.matched_tokens(made, 0) == (5 * BLOCK_TOKENS, False)


def digests_with(engine: Engine, lora: Any, name: str = "r") -> list[bytes]:
    """Begin a request with an adapter, and return the digests of its blocks."""
    made = request(name, TOKENS, lora=lora)
    assert eventually(lambda: engine.lookups.begin(made) is not None, LONG_S)
    return engine.lookups.digests(made, 0, 5)


def test_requests_with_adapters_of_one_name_share_only_if_the_adapter_is_the_same(
    pool_name: str, server: IndexServer, tmp_path: Path
) -> None:
    digests = []
    for folder, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        engine = Engine(pool_name)
        digests.append(digests_with(engine, adapter(tmp_path / folder, "x", content)))
        engine.connection.close()
    assert digests[0] == digests[2]
    assert set(digests[0]).isdisjoint(digests[1])
    assert set(digests[0]).isdisjoint(request("r", TOKENS).block_hashes)


def test_a_request_waits_for_the_hash_of_its_adapter(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = request("r", TOKENS, lora=adapter(tmp_path, "x"))
    go = threading.Event()
    real = Files.digest
    monkeypatch.setattr(Files, "digest", lambda self, hashed: (go.wait(), real(self, hashed))[1])
    assert engine.schedule.matched_tokens(made, 0) == (None, False)
    go.set()
    assert eventually(lambda: engine.schedule.matched_tokens(made, 0) == (0, False), LONG_S)
    assert engine.lookups.unchanged(made)
    go.clear()
    late = request("late", TOKENS, lora=adapter(tmp_path / "other", "y", b"2"))
    engine.schedule._onboard_s = 0
    assert engine.schedule.matched_tokens(late, 0) == (0, False)
    engine.step(late, 21)  # the request does not wait forever, and is not saved
    assert not engine.schedule.finished(late, [])
    go.set()


def test_nothing_is_saved_of_an_adapter_whose_files_change(engine: Engine, tmp_path: Path) -> None:
    lora = adapter(tmp_path, "x")
    digests_with(engine, lora, "first")
    made = request("r", TOKENS, lora=lora)
    engine.start(made)
    adapter(tmp_path, "x", b"other")
    assert engine.saves(made, 21) == []


def test_a_block_is_announced_when_every_rank_has_stored_it_and_it_is_new(engine: Engine) -> None:
    made = request("r", TOKENS)
    engine.start(made)
    engine.saves(made, 21)
    first, second, third = made.block_hashes[:3]
    half = StepReport(
        stored={first: StoredCounts(1, 1), second: StoredCounts(1, 0), third: StoredCounts(1, 1)}
    )
    engine.announcements.reported(half)
    assert engine.announcements.take() == []
    engine.announcements.reported(
        StepReport(stored={first: StoredCounts(1, 1), second: StoredCounts(1, 0)})
    )
    (announcement,) = engine.announcements.take()
    assert (announcement.block_hash, announcement.parent_hash) == (first, None)
    assert announcement.token_ids == TOKENS[:BLOCK_TOKENS]
    engine.announcements.reported(StepReport(stored={third: StoredCounts(1, 0)}))
    (announcement,) = engine.announcements.take()
    assert (announcement.block_hash, announcement.parent_hash) == (third, second)


def test_reports_of_ranks_add_up() -> None:
    report = StepReport({"r": Loaded(1, 5)}, {b"x": StoredCounts(1, 1)})
    other = {"r": Loaded(1, 3), "s": Loaded(1, 4)}
    report.add(StepReport(other, {b"x": StoredCounts(1, 0), b"y": StoredCounts(1, 1)}))
    assert report.loaded == {"r": Loaded(2, 3), "s": Loaded(1, 4)}
    assert report.stored == {b"x": StoredCounts(2, 1), b"y": StoredCounts(1, 1)}
    assert report
    assert not StepReport()


@pytest.mark.parametrize(
    ("role", "loads", "saves"),
    [("kv_both", True, True), ("kv_producer", False, True), ("kv_consumer", True, False)],
)
def test_the_role_determines_whether_blocks_are_loaded_and_saved(
    caches: list[KVCache], pool_name: str, role: str, loads: bool, saves: bool
) -> None:
    engine = Engine(pool_name, kv_role=role)
    try:
        assert engine.connection.wait(60)
        made = request("a", TOKENS)
        store(caches, made, 3, 3)
        assert engine.start(made) == (3 * BLOCK_TOKENS if loads else 0)
        other = request("b", [token + 1000 for token in TOKENS])
        assert engine.start(other) == 0
        engine.step(made, 0)
        engine.loaded("a")
        assert bool(engine.saves(other, len(TOKENS))) is saves
    finally:
        engine.connection.close()
