# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The scheduler's side: which blocks are looked up, loaded, saved and announced, and when."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_vllm import BLOCK_TOKENS, adapter, extend, request
from scene import LONG_S, RANKS, TOKENS, Scheduler, names, pinned, rank_caches, store
from support.blocks import eventually
from support.memory_tier import MemoryTier, served

from beluga import IndexServer, KVCache, Pool
from beluga.connectors.identity import Files
from beluga.connectors.vllm import events
from beluga.connectors.vllm.load_timing import IDLE_LIMIT_S, LIMIT_S, LoadTiming
from beluga.connectors.vllm.lookups import Worth
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.steps import Loaded, StepReport, StoredCounts

MakeScheduler = Callable[..., Scheduler]


def hit(caches: list[KVCache], count: int = 5) -> Any:
    """Make a request that has that many blocks in the pool."""
    made = request("r", TOKENS)
    store(caches, made, count, count)
    return made


def started(engine: Scheduler, computed: int = 0) -> Any:
    """Start a request that has no blocks in the pool."""
    made = request("r", TOKENS)
    engine.start(made, computed)
    return made


def test_a_hit_is_what_every_rank_has(engine: Scheduler, caches: list[KVCache]) -> None:
    made = request("r", TOKENS)
    store(caches, made, 4, 3)
    assert engine.start(made) == 3 * BLOCK_TOKENS
    (load,) = engine.step(made, 9).loads
    assert load.block_ids == [10, 11, 12]
    assert load.packed().tobytes() == b"".join(made.block_hashes[:3])
    store(caches, made, 5, 5)
    last = request("s", TOKENS[: 5 * BLOCK_TOKENS])
    assert engine.start(last) == 4 * BLOCK_TOKENS, "a token is left to compute"
    later = request("t", TOKENS)
    assert engine.start(later, computed=2 * BLOCK_TOKENS) == 3 * BLOCK_TOKENS
    assert engine.step(later, 1).loads[1].block_ids == [32, 33, 34], "the engine has the others"


def test_pins_are_released_and_hits_counted_when_all_ranks_have_loaded(
    engine: Scheduler, caches: list[KVCache]
) -> None:
    made = hit(caches)
    for _ in range(3):  # it is looked up once while it waits
        assert engine.schedule.matched_tokens(made, 0) == (5 * BLOCK_TOKENS, False)
    assert engine.counters.take()["lookups"] == 1
    engine.start(made)
    engine.step(made, 1)
    engine.loaded("r", ranks=1, blocks=5)
    assert pinned(caches) == 10
    assert "hit_tokens" not in engine.counters.take()  # the load was only announced
    engine.loaded("r", ranks=1, blocks=2)
    assert pinned(caches) == 0
    assert engine.counters.take()["hit_tokens"] == 2 * BLOCK_TOKENS
    dropped = request("dropped", TOKENS)
    engine.start(dropped)
    engine.schedule.finished(dropped, [])
    assert "hit_tokens" not in engine.counters.take()


@pytest.mark.parametrize("when", ["waiting", "refused", "loading"])
def test_pins_are_released_with_the_request(
    engine: Scheduler, caches: list[KVCache], when: str
) -> None:
    made = hit(caches)
    engine.schedule.matched_tokens(made, 0)
    assert pinned(caches) == 10
    if when == "refused":  # vLLM has decided not to load
        engine.schedule.allocated(made, list(range(10)), 0)
    if when == "loading":
        engine.schedule.allocated(made, list(range(10)), 5 * BLOCK_TOKENS)
    engine.schedule.finished(made, [])
    assert pinned(caches) == 0


def test_blocks_are_saved_with_the_step_after_the_one_that_completes_them(
    engine: Scheduler,
) -> None:
    made = request("r", TOKENS)
    assert engine.start(made) == 0
    assert engine.step(made, 6).saves == []
    assert names(engine.step(made, 3).saves) == [("r", [10])]
    assert names(engine.step(made, 12).saves) == [("r", [11])]
    assert engine.schedule.pending  # so that vLLM runs one more step
    assert engine.saves() == [("r", [12, 13, 14])]
    assert not engine.schedule.pending
    assert engine.saves(made, 1) == []


def test_generated_tokens_are_saved_once_accepted(engine: Scheduler) -> None:
    made = request("r", TOKENS[:BLOCK_TOKENS])
    engine.start(made)
    assert engine.saves(made, BLOCK_TOKENS) == [("r", [10])]
    for token in range(BLOCK_TOKENS):
        # the hash of draft tokens is also unknown before
        assert engine.saves(made, 1) == []
        extend(made, [token])
    assert engine.saves(made, 1) == [("r", [11])]


def test_loaded_blocks_are_not_saved(engine: Scheduler, caches: list[KVCache]) -> None:
    made = hit(caches, 4)
    engine.start(made, computed=BLOCK_TOKENS)
    engine.step(made, 4)
    engine.loaded("r")
    assert engine.saves(made, 1) == [("r", [10]), ("r", [14])]


def test_nothing_is_saved_before_its_step_is_processed(engine: Scheduler) -> None:
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
    engine: Scheduler,
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
def test_blocks_computed_on_a_failed_load_are_never_saved(engine: Scheduler, aborted: bool) -> None:
    """vLLM leaves the blocks in its own cache, and computes them again if it still has to."""
    made = started(engine, computed=3 * BLOCK_TOKENS)
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
    engine: Scheduler,
) -> None:
    """vLLM computes them again, whenever a connector reports them."""
    made = started(engine)
    assert engine.saves(made, 3 * BLOCK_TOKENS) == [("r", [10, 11, 12])]
    engine.schedule.reported(None, {11})
    made.num_computed_tokens = BLOCK_TOKENS
    assert engine.saves() == []
    assert engine.saves(made, 4 * BLOCK_TOKENS) == [("r", [11, 12, 13, 14])]


@pytest.mark.parametrize("order", ["rst", "tsr"])
def test_unverified_blocks_stay_unverified_in_requests_that_share_them(
    engine: Scheduler, order: str
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


def test_a_request_that_ends_with_the_step_of_a_failed_load_saves_nothing(
    engine: Scheduler,
) -> None:
    """vLLM calls ``request_finished`` before it passes on what the same step failed to load."""
    made = started(engine, computed=3 * BLOCK_TOKENS)
    engine.step(made, 9)
    assert engine.schedule.finished(made, engine.blocks["r"])
    engine.schedule.reported(None, {10})
    assert engine.saves() == [("r", [])]  # only makes the workers report the request's end


def test_a_request_that_ends_while_another_connector_loads_saves_nothing(engine: Scheduler) -> None:
    """Its blocks count as computed before the bytes arrive."""
    made = started(engine, computed=3 * BLOCK_TOKENS)
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
    engine: Scheduler, caches: list[KVCache]
) -> None:
    made = hit(caches, 3)
    engine.start(made)
    engine.step(made, 9)
    made.num_computed_tokens = BLOCK_TOKENS  # vLLM returns to valid tokens
    engine.loaded("r", invalid={11, 12}, blocks=1)
    assert engine.saves(made, 17) == [("r", [11, 12, 13, 14])]
    assert engine.schedule.matched_tokens(made, 0) == (0, False)


@pytest.mark.parametrize("ended", [False, True])
def test_blocks_with_nans_are_not_saved(engine: Scheduler, ended: bool) -> None:
    made, sharer = started(engine), request("s", TOKENS)
    if ended:
        engine.step(made, 21)
        made.num_nans_in_logits = 3
        assert engine.schedule.finished(made, engine.blocks["r"])
        assert engine.saves() == [("r", [])]
    else:
        assert engine.saves(made, 6) == [("r", [10])]
        engine.step(made, 1)
        made.num_nans_in_logits = 3
        assert engine.saves() == []
        engine.step(made, 14)
        made.num_nans_in_logits = 0
        assert engine.saves() == []
    engine.blocks["s"] = [10, 11, 12, 77, 78, 79]
    engine.start(sharer, computed=3 * BLOCK_TOKENS)
    assert engine.saves(sharer, 9) == ([] if ended else [("s", [10])])


def test_the_last_blocks_are_saved_when_a_request_ends(
    engine: Scheduler, caches: list[KVCache]
) -> None:
    """It computes its only token after a hit, as a remote prefill does."""
    made = hit(caches, 3)
    engine.start(made)
    engine.step(made, 9)
    assert engine.schedule.finished(made, engine.blocks["r"])  # vLLM reports the load after this
    engine.loaded("r")
    assert engine.schedule.pending
    assert engine.saves() == [("r", [13, 14])]
    assert not engine.schedule.pending
    assert engine.saves() == []


def test_tokens_in_flight_are_not_saved_when_a_request_ends(engine: Scheduler) -> None:
    made = started(engine)
    engine.step(made, 7)
    made.num_in_flight_tokens = 7
    engine.step(made, 5)
    made.num_in_flight_tokens = 5
    assert engine.schedule.finished(made, engine.blocks["r"])
    assert engine.saves() == [("r", [10])]
    assert not engine.schedule.pending
    made.num_in_flight_tokens = 0
    assert engine.saves() == []
    short = request("short", TOKENS[:3])
    engine.start(short)
    engine.step(short, 3)
    assert not engine.schedule.finished(short, engine.blocks["short"]), "it saves nothing"


def test_a_preempted_request_is_looked_up_again(engine: Scheduler, caches: list[KVCache]) -> None:
    made = started(engine)
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


def test_asynchronous_loads_do_not_delay_saves(
    make_scheduler: MakeScheduler, caches: list[KVCache]
) -> None:
    engine = make_scheduler(load="async")
    assert engine.connection.wait(LONG_S)
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
    assert pinned(caches) == 0
    engine.schedule.allocated(made, engine.blocks["r"], 0)  # vLLM calls again after the load
    made.num_computed_tokens = 3 * BLOCK_TOKENS
    assert engine.saves(made, 9) == [("r", [73, 74])]
    refused = request("refused", TOKENS)
    assert engine.schedule.matched_tokens(refused, 0) == (3 * BLOCK_TOKENS, True)
    assert pinned(caches) > 0
    engine.schedule.allocated(refused, [], 0)
    assert pinned(caches) == 0


def test_after_a_reset_an_engine_has_a_separate_namespace(
    engine: Scheduler, caches: list[KVCache]
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
    assert pinned(caches) == 0
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


def test_a_loaded_request_is_looked_up_again_when_it_restarts(
    engine: Scheduler, caches: list[KVCache]
) -> None:
    made = hit(caches)
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
    make_scheduler: MakeScheduler, caches: list[KVCache], load: str
) -> None:
    """vLLM would wait forever for blocks that it has reserved for the same request."""
    engine = make_scheduler(load=load)
    assert engine.connection.wait(LONG_S)
    made = hit(caches)
    expected = (5 * BLOCK_TOKENS, load == "async")
    assert engine.schedule.matched_tokens(made, 0) == expected
    assert engine.schedule.matched_tokens(made, 0) == expected  # it waits for blocks meanwhile
    engine.schedule.allocated(made, engine.blocks.setdefault("r", [1, 2, 3, 4, 5]), 0)
    engine.schedule.orders({}, [])
    assert engine.schedule.matched_tokens(made, 0) == (0, False)
    assert pinned(caches) == 0


def test_a_rank_that_is_late_with_one_request_does_not_delay_another(
    engine: Scheduler, caches: list[KVCache]
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
    engine: Scheduler, caches: list[KVCache]
) -> None:
    made = hit(caches)
    engine.lookups.ranks = ()
    assert engine.schedule.matched_tokens(made, 0) == (0, False)
    engine.lookups.ranks = RANKS
    assert engine.schedule.matched_tokens(made, 0) == (5 * BLOCK_TOKENS, False)


def digests_with(engine: Scheduler, lora: Any, name: str = "r") -> list[bytes]:
    """Begin a request with an adapter, and return the digests of its blocks."""
    made = request(name, TOKENS, lora=lora)
    assert eventually(lambda: engine.lookups.begin(made) is not None, LONG_S)
    return engine.lookups.digests(made, 0, 5)


def test_requests_with_adapters_of_one_name_share_only_if_the_adapter_is_the_same(
    make_scheduler: MakeScheduler, server: IndexServer, tmp_path: Path
) -> None:
    first, other, same = (
        digests_with(make_scheduler(), adapter(tmp_path / folder, "x", content))
        for folder, content in (("a", b"1"), ("b", b"2"), ("c", b"1"))
    )
    assert first == same
    assert set(first).isdisjoint([*other, *request("r", TOKENS).block_hashes])


def test_a_request_waits_for_the_hash_of_its_adapter(
    engine: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_nothing_is_saved_of_an_adapter_whose_files_change(
    engine: Scheduler, tmp_path: Path
) -> None:
    lora = adapter(tmp_path, "x")
    digests_with(engine, lora, "first")
    made = request("r", TOKENS, lora=lora)
    engine.start(made)
    adapter(tmp_path, "x", b"other")
    assert engine.saves(made, 21) == []


def test_a_block_is_announced_once_when_every_rank_has_stored_it_and_it_is_new(
    engine: Scheduler,
) -> None:
    made = request("r", TOKENS, lora=SimpleNamespace(lora_name="a"))
    for block in range(5):
        engine.announcements.ordered(made.block_hashes[block], made, block, ("a",))
    first, second, third = made.block_hashes[:3]

    def announced(**stored: tuple[bytes, int]) -> list[Any]:
        report = {digest: StoredCounts(1, new) for digest, new in stored.values()}
        engine.announcements.reported(StepReport(stored=report))
        return engine.announcements.take()

    assert announced(a=(first, 1), b=(second, 0), c=(third, 1), d=(b"another's", 1)) == []
    (announcement,) = announced(a=(first, 1), b=(second, 0))
    assert (announcement.block_hash, announcement.parent_hash) == (first, None)
    assert announcement.token_ids == TOKENS[:BLOCK_TOKENS]
    assert (announcement.lora_name, announcement.extra_keys) == ("a", ("a",))
    (announcement,) = announced(c=(third, 0))
    assert (announcement.block_hash, announcement.parent_hash) == (third, second)
    assert announcement.token_ids == TOKENS[2 * BLOCK_TOKENS : 3 * BLOCK_TOKENS]
    assert announced(c=(third, 1)) == []


def test_the_oldest_announcements_are_dropped_when_too_many_are_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "PENDING_MAX", 3)
    announcements = events.Announcements(rank_count=lambda: 1, block_size=BLOCK_TOKENS)
    made = request("r", TOKENS)
    for block in range(4):
        announcements.ordered(made.block_hashes[block], made, block, None)
    stored = {digest: StoredCounts(1, 1) for digest in made.block_hashes}
    announcements.reported(StepReport(stored=stored))
    assert [each.block_hash for each in announcements.take()] == made.block_hashes[1:4]


def test_reports_of_ranks_add_up() -> None:
    report = StepReport({"r": Loaded(1, 5)}, {b"x": StoredCounts(1, 1)})
    other = {"r": Loaded(1, 3), "s": Loaded(1, 4)}
    report.add(StepReport(other, {b"x": StoredCounts(1, 0), b"y": StoredCounts(1, 1)}))
    assert report.loaded == {"r": Loaded(2, 3), "s": Loaded(1, 4)}
    assert report.stored == {b"x": StoredCounts(2, 1), b"y": StoredCounts(1, 1)}
    assert report
    assert not StepReport()


@pytest.mark.parametrize(
    ("settings", "loads", "saves"),
    [
        ({"kv_role": "kv_both"}, True, True),
        ({"kv_role": "kv_producer"}, False, True),
        ({"kv_role": "kv_consumer"}, True, False),
        ({"save": False}, True, False),
    ],
    ids=str,
)
def test_settings_determine_whether_blocks_are_loaded_and_saved(
    caches: list[KVCache],
    make_scheduler: MakeScheduler,
    settings: dict[str, Any],
    loads: bool,
    saves: bool,
) -> None:
    engine = make_scheduler(**settings)
    assert engine.connection.wait(LONG_S)
    made = request("a", TOKENS)
    store(caches, made, 3, 3)
    assert engine.start(made) == (3 * BLOCK_TOKENS if loads else 0)
    other = request("b", [token + 1000 for token in TOKENS])
    assert engine.start(other) == 0
    engine.step(made, 0)
    engine.loaded("a")
    assert bool(engine.saves(other, len(TOKENS))) is saves
    assert engine.schedule.finished(other, engine.blocks["b"]) is saves
    assert not engine.schedule.pending


# ---- The setting load: auto. No forward waits for more than a few milliseconds of loads.

MIB = 1 << 20


def timing(load: str = "auto", size: int = MIB) -> LoadTiming:
    return LoadTiming(load, lambda: size)


def test_a_load_is_concurrent_with_forwards_if_its_bytes_take_too_long() -> None:
    for load, concurrent in (("sync", False), ("async", True)):
        for blocks, idle in ((1, False), (1000, False), (1, True), (1000, True)):
            assert timing(load).concurrent(blocks, idle=idle) is concurrent
    rule = timing()
    limit = int(8e9 * LIMIT_S) // MIB  # in blocks, at the speed that is assumed
    assert not rule.concurrent(limit, idle=False)
    assert rule.concurrent(limit + 1, idle=False)
    assert not timing(size=MIB // 4).concurrent(4 * limit, idle=False)
    limit = int(8e9 * IDLE_LIMIT_S) // MIB  # before a forward of its request alone
    assert rule.concurrent(limit, idle=False)
    assert not rule.concurrent(limit, idle=True)
    assert rule.concurrent(limit + 1, idle=True)
    rule.planned(limit)
    assert rule.concurrent(1, idle=True)


def test_the_speed_is_measured_from_earlier_loads() -> None:
    rule = timing()
    rule.took(64, 64 * MIB / 1e9)  # slow memory
    assert not rule.concurrent(3, idle=False)
    assert rule.concurrent(4, idle=False)
    for _ in range(100):
        rule.took(64, 64 * MIB / 32e9)
    assert not rule.concurrent(100, idle=False)
    small = timing(size=4096)
    small.took(8, 0.5)  # as long as a call, or as a thread that is not scheduled
    assert not small.concurrent(1000, idle=False)


def test_the_loads_of_one_forward_have_one_limit() -> None:
    rule = timing()
    half = int(8e9 * LIMIT_S) // MIB // 2 + 1
    assert not rule.concurrent(half, idle=False)
    rule.planned(half)
    assert rule.concurrent(half, idle=False)
    rule.began()
    assert not rule.concurrent(half, idle=False)


@pytest.fixture
def busy(engine: Scheduler) -> Scheduler:
    """An engine with long blocks, which decodes another request."""
    engine.lookups.block_bytes = 8 * MIB
    engine.schedule.orders({"other": 1}, [])
    return engine


def prompts(caches: list[KVCache], *counts: int) -> list[Any]:
    """Return requests that have that many blocks in the pool."""
    made = []
    for number, count in enumerate(counts):
        reply = request(f"r{number}", [number * 1000 + token for token in TOKENS])
        store(caches, reply, count, count)
        made.append(reply)
    return made


def test_the_same_load_runs_before_a_forward_once_nothing_else_computes(
    busy: Scheduler, caches: list[KVCache]
) -> None:
    first, second, third = prompts(caches, 5, 5, 5)
    assert busy.start(first) == 5 * BLOCK_TOKENS
    assert [load.concurrent for load in busy.schedule.orders({"other": 1, "r0": 1}, []).loads] == [
        True
    ]
    busy.schedule.finished(request("other", TOKENS), [])
    assert busy.schedule.matched_tokens(second, 0) == (5 * BLOCK_TOKENS, True)
    busy.schedule.finished(first, busy.blocks["r0"])
    assert busy.schedule.matched_tokens(third, 0) == (5 * BLOCK_TOKENS, False)


@pytest.mark.parametrize(
    ("counts", "concurrent"), [((2, 5, 1), [False, True, False]), ((2, 2, 2), [False, True, True])]
)
def test_short_loads_delay_the_forward_until_they_add_up_to_a_long_pause(
    busy: Scheduler, caches: list[KVCache], counts: tuple[int, ...], concurrent: list[bool]
) -> None:
    for waiting in prompts(caches, *counts):
        busy.start(waiting)
    assert [load.concurrent for load in busy.schedule.orders({}, []).loads] == concurrent


def test_async_loads_measure_the_speed_for_later_ones(
    busy: Scheduler, caches: list[KVCache]
) -> None:
    first, second = prompts(caches, 5, 5)
    assert busy.schedule.matched_tokens(first, 0) == (5 * BLOCK_TOKENS, True)
    busy.schedule.allocated(first, list(range(10)), 5 * BLOCK_TOKENS)
    report = StepReport({"r0": Loaded(1, 5, 0.0001)})
    report.add(StepReport({"r0": Loaded(1, 5, 0.001)}))  # the slowest rank determines the time
    busy.schedule.reported(report, set())
    assert pinned(caches) == 0
    assert busy.schedule.matched_tokens(second, 0) == (5 * BLOCK_TOKENS, False)


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_request_that_ends_during_an_async_load_releases_its_pins(
    busy: Scheduler, caches: list[KVCache], end: str
) -> None:
    (made,) = prompts(caches, 5)
    assert busy.start(made) == 5 * BLOCK_TOKENS
    assert busy.schedule.orders({}, []).loads[0].concurrent
    if end == "abort":
        assert not busy.schedule.finished(made, busy.blocks["r0"])
        assert pinned(caches) == 0
        busy.loaded("r0")  # the ranks still report it
        assert not busy.schedule.pending
        return
    made.num_computed_tokens = 0
    busy.schedule.orders({}, ["r0"])
    busy.lookups.block_bytes = MIB  # the next load is short
    assert busy.schedule.matched_tokens(made, 0) == (5 * BLOCK_TOKENS, False)
    busy.schedule.allocated(made, busy.blocks["r0"], 5 * BLOCK_TOKENS)
    assert [load.concurrent for load in busy.schedule.orders({}, []).loads] == [False]


def test_orders_have_the_offset_of_each_ranks_part_of_a_block(
    busy: Scheduler, caches: list[KVCache]
) -> None:
    made, other = prompts(caches, 5, 3)
    tokens, _ = busy.schedule.matched_tokens(made, BLOCK_TOKENS)
    busy.schedule.allocated(made, list(range(10)), 3 * BLOCK_TOKENS)  # vLLM requests fewer tokens
    assert tokens == 4 * BLOCK_TOKENS
    (load,) = busy.schedule.orders({}, []).loads
    for part, cache in enumerate(caches):
        pins = cache.pin(made.block_hashes[1:4])
        records = load.located(part)
        assert records is not None
        assert (records == pins.records()).all()
        cache.release(pins)
    busy.schedule.matched_tokens(other, 0)
    busy.schedule._unpin(busy.schedule._requests["r1"])
    busy.schedule.allocated(other, list(range(10)), 3 * BLOCK_TOKENS)
    assert busy.schedule.orders({}, []).loads[0].located(0) is None, "it has no pins"


# ---- Blocks in a tier below the pool, for which a request waits.


@contextlib.contextmanager
def below(folder: Path, made: Any, **changes: Any) -> Iterator[tuple[Scheduler, MemoryTier]]:
    """Make an engine over a pool with a tier that has a request's five blocks for each rank."""
    tier = MemoryTier()
    folder.mkdir(exist_ok=True)
    with served(folder / "first", tier) as pool:
        caches = rank_caches(pool)
        store(caches, made, 5, 5)
        for cache in caches:
            cache.close()
        assert eventually(lambda: len(tier.blocks) == 10)
    with (
        served(folder / "pool", tier),
        contextlib.closing(Scheduler(str(folder / "pool"), **changes)) as engine,
    ):
        assert engine.connection.wait(LONG_S)
        yield engine, tier


def fetched(engine: Scheduler, made: Any) -> int:
    """Look a request up until its blocks are in the pool. Returns the tokens of the hit."""
    matches: list[int | None] = []

    def answered() -> bool:
        matches.append(engine.schedule.matched_tokens(made, 0)[0])
        return matches[-1] is not None

    assert eventually(answered)
    assert matches[0] is None, "the blocks were not in the pool yet"
    assert matches[-1] is not None
    return matches[-1]


def test_a_request_waits_for_blocks_below_the_pool_as_long_as_settings_allow(shm: Path) -> None:
    made = request("r", TOKENS)
    with below(shm, made, onboard_ms=100) as (engine, tier):
        tier.open.clear()
        try:
            start_s = time.monotonic()
            assert fetched(engine, made) == 0
            assert time.monotonic() - start_s >= 0.1
        finally:
            tier.open.set()
    with below(shm / "off", made, onboard_ms=0) as (engine, _):
        assert engine.schedule.matched_tokens(made, 0) == (0, False)


def test_blocks_that_turn_out_to_be_lost_are_a_miss(shm: Path) -> None:
    made = request("r", TOKENS)
    with below(shm, made) as (engine, tier):
        with KVCache(Pool.open([shm / "pool"]), namespace=RANKS[0]) as cache:
            keys = cache.keys(list(made.block_hashes[:5]))
        del tier.blocks[tuple(int(word) for word in keys[3])]
        assert fetched(engine, made) == 3 * BLOCK_TOKENS


def test_blocks_that_are_faster_to_compute_are_not_fetched(shm: Path) -> None:
    made = request("r", TOKENS)
    with below(shm, made, prefill_b_ms=1e-6) as (engine, _):
        assert fetched(engine, made) == 5 * BLOCK_TOKENS  # only the first one is measured
        worth = Worth(engine.settings, BLOCK_TOKENS)
        assert worth.pays(0, 5)
        worth.took(5, 0.1)
        assert not worth.pays(0, 5)
        cheap = Worth(VllmSettings(), BLOCK_TOKENS)
        cheap.took(5, 0.1)
        assert cheap.pays(0, 5)
