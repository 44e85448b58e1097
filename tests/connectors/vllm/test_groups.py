# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Hybrid models: exactly the blocks that each group needs are looked up, loaded and saved."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import fakes
import numpy as np
import pytest
from fake_vllm import (
    NULL,
    STEP,
    UNIT,
    BlockPool,
    FineRules,
    KVCacheConfig,
    Rules,
    request,
    rule_modules,
)
from scene import LONG_S, RANKS, Scheduler, pinned

from beluga import IndexServer, KVCache
from beluga.connectors.vllm.media import MARK
from beluga.connectors.vllm.steps import BlockRange, Loaded, Orders, StepReport, StoredCounts

FULL, WINDOW, STATE = range(3)
TOKENS = list(range(100, 100 + 3 * STEP + 1))  # three boundaries and a token


class Engine(Scheduler):
    """A schedule for two ranks, with the engine's tables in four groups, one of them scratch."""

    block_tokens = 0  # of announcements: each group has its own

    def __init__(self, pool_name: str, kv_cache: KVCacheConfig) -> None:
        self._kv_cache, self.pool = kv_cache, BlockPool(64)
        self.junction = 0  # first difference between a request's prompt and that of another one
        super().__init__(pool_name, block_count=64, load="async")

    def groups(self) -> Any:
        return importlib.import_module("beluga.connectors.vllm.groups").Groups(
            None,
            self._kv_cache,
            self.lookups,
            table_of=self.blocks.__getitem__,
            pool=lambda: self.pool,
            extra_keys_of=lambda _, first, last, size: [(size,)] * (last - first),
            counters=self.counters,
            announcements=self.announcements,
        )

    def start(self, made: Any, computed: int = 0) -> int:
        """Start a request. Returns the tokens that it loads."""
        made.num_prompt_tokens, made.num_preemptions = made.num_tokens, 0
        made.shared_prefix_boundary = self.junction
        tokens, concurrent = self.schedule.matched_tokens(made, computed)
        assert tokens is not None
        assert concurrent == (tokens > 0)
        count = made.num_tokens // UNIT + 1
        full, window = list(range(1, 1 + count)), list(range(20, 20 + count))
        states = list(range(40, 40 + count // 2 + 1))
        if tokens:  # vLLM allocates no blocks if nothing is loaded
            resumed = (computed + tokens) // UNIT
            window[: resumed - 2] = [NULL] * (resumed - 2)
            states[: resumed // 2 - 1] = [NULL] * (resumed // 2 - 1)
        self.blocks[made.request_id] = (full, window, [60], states)
        self.schedule.allocated(made, self.blocks[made.request_id], tokens)
        made.num_computed_tokens = computed + tokens
        return int(tokens)

    def step(self, made: Any, tokens: int, offers: Any = ()) -> Orders:  # type: ignore[override]
        """Run a step that computes that many tokens of a request, and take its output."""
        orders = self.schedule.orders(
            {made.request_id: tokens} if tokens else {}, [], {made.request_id: list(offers)}
        )
        made.num_computed_tokens += tokens
        return orders

    def computed(self, made: Any) -> list[BlockRange]:
        """Compute a prompt, boundary by boundary as vLLM does, and return what is saved."""
        saves = []
        while made.num_computed_tokens < made.num_tokens:
            left = made.num_tokens - made.num_computed_tokens
            boundary = made.num_computed_tokens + STEP
            offers = [(3, self.blocks[made.request_id][3][boundary // STEP - 1], boundary)]
            last = boundary == (made.num_tokens - 1) // STEP * STEP
            saves += self.step(made, min(left, STEP), offers if last else ()).saves
        return saves + self.step(made, 0).saves


@contextlib.contextmanager
def made_engine(
    pool_name: str, monkeypatch: pytest.MonkeyPatch, rules: Any, **groups: Any
) -> Iterator[Engine]:
    for name, module in fakes.modules("vllm", rule_modules()).items():
        monkeypatch.setitem(sys.modules, name, module)
        if hasattr(module, "MooncakeStoreCoordinator"):
            module.MooncakeStoreCoordinator = rules  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "beluga.connectors.vllm.groups", raising=False)
    with contextlib.closing(Engine(pool_name, KVCacheConfig(**groups))) as engine:
        assert engine.connection.wait(LONG_S)
        yield engine


@pytest.fixture
def engine(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    with made_engine(pool_name, monkeypatch, Rules) as engine:
        yield engine


@pytest.fixture
def fine(server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that resumes within blocks."""
    groups = {"prefix_cacheable_group_ids": (0, 3)}
    with made_engine(pool_name, monkeypatch, FineRules, **groups) as engine:
        yield engine


def store(caches: list[KVCache], ranges: list[BlockRange]) -> list[BlockRange]:
    """Put the scheduled blocks, with a size for each group."""
    for cache in caches:
        for span in ranges:
            content = np.ones((len(span.block_ids), 64 * (span.group + 1)), dtype=np.uint8)
            cache.put(span.packed(), content)
    return ranges


def stored(engine: Engine, caches: list[KVCache]) -> list[BlockRange]:
    """Compute a prompt and put its blocks into the pool."""
    first = request("first", TOKENS)
    engine.start(first)
    return store(caches, engine.computed(first))


def shape(ranges: list[BlockRange]) -> list[tuple[int, list[int]]]:
    return [(span.group, span.block_ids) for span in ranges]


def test_blocks_in_the_cache_of_vllm_are_pinned_and_saved_in_their_step(engine: Engine) -> None:
    made = request("r", TOKENS)
    assert engine.start(made) == 0
    assert engine.step(made, STEP).saves == []
    assert engine.pool.pinned() == {1, 2}  # two blocks of full attention, none of the window
    (save,) = engine.step(made, STEP).saves
    assert shape([save]) == [(FULL, [1, 2])]
    assert engine.pool.pinned() == {1, 2, 3, 4}
    (more,) = engine.step(made, STEP, [(3, 42, 3 * STEP)]).saves
    assert shape([more]) == [(FULL, [3, 4])]
    saves = engine.step(made, 1).saves
    assert shape(saves) == [(FULL, [5, 6]), (WINDOW, [24, 25]), (STATE, [42])]
    assert engine.pool.pinned() == {1, 2, 3, 4, 5, 6, 24, 25, 42}


@pytest.mark.parametrize("workers", [len(RANKS), 2 * len(RANKS)])
def test_pins_are_released_when_all_ranks_have_saved(engine: Engine, workers: int) -> None:
    """There may be more ranks than parts of a block."""
    engine.lookups.meet([RANKS[n * len(RANKS) // workers] for n in range(workers)])
    assert engine.lookups.worker_count == workers
    made = request("r", TOKENS)
    engine.start(made)
    tickets = [save.ticket for save in engine.computed(made)]
    assert len(set(tickets)) == len(tickets) == 5
    assert engine.schedule.pending  # vLLM continues with steps until they have ended
    for _ in range(workers):
        assert engine.pool.pinned()
        engine.schedule.reported(StepReport(ended=Counter(tickets)), set())
    assert not engine.pool.pinned()
    assert not engine.schedule.saving


@pytest.mark.parametrize("sub_block", [0, UNIT])
def test_a_common_prefix_of_two_prompts_can_be_resumed(engine: Engine, sub_block: int) -> None:
    """vLLM keeps the window there, and offers the state."""
    made = request("r", TOKENS)
    engine.junction = 2 * STEP + sub_block
    engine.start(made)
    saves = engine.step(made, STEP).saves + engine.step(made, STEP, [(3, 41, 2 * STEP)]).saves
    saves += engine.step(made, STEP).saves + engine.step(made, 1).saves
    stored = {(save.group, block) for save in saves for block in save.block_ids}
    assert {(WINDOW, 22), (WINDOW, 23), (STATE, 41)} <= stored
    assert stored - {(FULL, block) for block in range(1, 7)} == {
        *((WINDOW, block) for block in (22, 23, 24, 25)),
        (STATE, 41),
    }


def test_states_that_are_unlikely_to_be_resumed_are_skipped_and_counted(engine: Engine) -> None:
    """vLLM offers them with prefix_cache_retention_interval."""
    made = request("r", TOKENS)
    engine.start(made)
    saves: list[BlockRange] = []
    for number in range(3):
        saves += engine.step(made, STEP, [(3, 40 + number, (number + 1) * STEP)]).saves
    saves += engine.step(made, 1, [(3, 43, 3 * STEP + UNIT), (2, 60, 3 * STEP)]).saves
    saves += engine.step(made, 0).saves
    states = [block for save in saves if save.group == STATE for block in save.block_ids]
    assert states == [42]
    assert engine.counters.take()["save_states_left"] == 4


def announced(engine: Engine, saves: list[BlockRange]) -> list[Any]:
    """Report that all ranks have stored what is saved, and return what is announced."""
    digests = [digest.tobytes() for save in saves for digest in save.packed()]
    for _ in RANKS:
        stored = {digest: StoredCounts(1, 1) for digest in digests}
        engine.announcements.reported(StepReport(stored=stored))
    return engine.announcements.take()


def test_blocks_of_each_group_are_announced_as_vllm_announces_its_own(engine: Engine) -> None:
    made = request("r", TOKENS)
    engine.start(made)
    events = announced(engine, engine.computed(made))
    sizes = {0: UNIT, 1: UNIT, 3: STEP}  # of the engine's groups
    whole, window, states = [1, 2, 3, 4, 5, 6], [5, 6], [3]
    ends = {0: whole, 1: window, 3: states}  # in blocks of the group
    assert sorted((event.group, event.block_hash) for event in events) == sorted(
        (group, made.block_hashes[end * sizes[group] // UNIT - 1])
        for group, group_ends in ends.items()
        for end in group_ends
    )
    for event in events:
        size = sizes[event.group]
        at = (made.block_hashes.index(event.block_hash) + 1) * UNIT
        before = made.block_hashes[(at - size) // UNIT - 1] if at > size else None
        assert event.parent_hash == before
        assert event.token_ids == TOKENS[at - size : at]
        assert event.extra_keys == (size,)


def test_a_private_block_is_not_announced(engine: Engine) -> None:
    named = request("r", TOKENS, images=[("a client's name", 2 * UNIT)])
    engine.start(named)
    events = announced(engine, engine.computed(named))
    assert {(event.group, event.block_hash) for event in events} == {
        (0, named.block_hashes[0]),
        (0, named.block_hashes[1]),
    }
    hashed = request("s", [token + 500 for token in TOKENS], images=[(f"{MARK}x", 2 * UNIT)])
    engine.start(hashed)
    assert len(announced(engine, engine.computed(hashed))) == 9


def test_a_state_is_taken_at_whole_boundaries_of_stored_groups(engine: Engine) -> None:
    made = request("r", TOKENS)
    engine.start(made)
    engine.step(made, STEP, [(3, 40, STEP + UNIT), (2, 60, STEP), (3, NULL, STEP)])
    assert shape(engine.step(made, 0).saves) == [(FULL, [1, 2])]


@pytest.mark.parametrize("how", ["finished", "preempted"])
def test_blocks_without_an_order_are_released(engine: Engine, how: str) -> None:
    made = request("r", TOKENS)
    engine.start(made)
    made.num_in_flight_tokens = STEP  # the step's output is still to come
    engine.step(made, STEP)
    assert engine.pool.pinned()
    if how == "finished":
        assert not engine.schedule.finished(made, engine.blocks["r"])
    else:
        made.num_computed_tokens = made.num_in_flight_tokens = 0
        engine.schedule.orders({}, [])
    assert not engine.pool.pinned()


def test_the_end_of_a_request_saves_completed_blocks(engine: Engine) -> None:
    made = request("r", TOKENS)
    engine.start(made)
    engine.step(made, STEP)
    assert engine.schedule.finished(made, engine.blocks["r"])
    (save,) = engine.schedule.orders({}, []).saves
    assert shape([save]) == [(FULL, [1, 2])]
    engine.schedule.reported(StepReport(ended=Counter({save.ticket: len(RANKS)})), set())
    assert not engine.pool.pinned()


def test_a_hit_loads_a_window_and_one_state_and_saves_nothing_again(
    engine: Engine, caches: list[KVCache]
) -> None:
    stored(engine, caches)
    before = engine.pool.pinned()
    made = request("r", TOKENS)
    assert engine.start(made) == 3 * STEP
    assert pinned(caches) == 2 * (6 + 2 + 1)
    loads = engine.step(made, 0).loads
    assert shape(loads) == [(FULL, [1, 2, 3, 4, 5, 6]), (WINDOW, [24, 25]), (STATE, [42])]
    digests = [row.tobytes() for load in loads for row in load.packed()]
    assert len(set(digests)) == 9  # a hash names a block of each group
    engine.schedule.reported(StepReport({"r": Loaded(2, 9)}), set())
    assert engine.counters.take()["hit_tokens"] == 3 * STEP
    engine.step(made, 1, [(3, 50, 3 * STEP)])  # vLLM offers what was loaded, too
    assert engine.pool.pinned() == before
    assert engine.step(made, 0).saves == []
    later = request("later", TOKENS)
    assert engine.start(later, computed=2 * STEP) == STEP
    loads = engine.step(later, 0).loads  # the engine's own cache has the others
    assert shape(loads) == [(FULL, [5, 6]), (WINDOW, [24, 25]), (STATE, [42])]


@pytest.mark.parametrize("group", [FULL, WINDOW, STATE])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_that_one_rank_lacks_in_any_group_ends_the_hit(
    engine: Engine, caches: list[KVCache], group: int, rank: int
) -> None:
    lost = [save for save in stored(engine, caches) if save.group == group][-1]
    caches[rank].remove([lost.packed()[-1].tobytes()])
    assert engine.start(request("r", TOKENS)) == 0
    assert pinned(caches) == 0


def test_a_failed_load_is_not_repeated(engine: Engine, caches: list[KVCache]) -> None:
    stored(engine, caches)
    made = request("r", TOKENS)
    assert engine.start(made) == 3 * STEP
    engine.counters.take()
    engine.schedule.reported(StepReport({"r": Loaded(2, 8)}), set())
    assert pinned(caches) == 0
    assert engine.counters.take()["hit_tokens"] == 0
    assert engine.start(made) == 0
    assert shape(engine.computed(made))[:1] == [(FULL, [1, 2])]  # all is computed and saved again


def test_a_miss_is_cached_and_a_failed_lookup_is_not(engine: Engine, server: IndexServer) -> None:
    made = request("r", TOKENS)
    made.num_prompt_tokens = made.num_tokens
    for _ in range(3):
        assert engine.schedule.matched_tokens(made, 0) == (0, False)
    assert engine.counters.take()["lookups"] == 1
    engine.lookups.ranks = ()
    assert engine.schedule.matched_tokens(request("s", TOKENS), 0) == (0, False)
    assert "lookups" not in engine.counters.take()


def test_a_reset_saves_nothing_that_was_computed_before(engine: Engine) -> None:
    made = request("r", TOKENS)
    engine.start(made)
    engine.step(made, STEP)
    engine.schedule.reset()
    assert engine.step(made, STEP).saves == []
    assert not engine.schedule.finished(made, engine.blocks["r"])
    assert not engine.pool.pinned()


def test_a_missing_block_id_fails_the_load(engine: Engine, caches: list[KVCache]) -> None:
    stored(engine, caches)
    made = request("r", TOKENS)
    tokens, _ = engine.schedule.matched_tokens(made, 0)
    table = ([1, 2, 3, 4, 5, 6], [NULL] * 5 + [25], [60], [NULL, NULL, 42])
    engine.schedule.allocated(made, table, tokens or 0)
    assert shape(engine.step(made, 0).loads) == [(FULL, [])]
    engine.schedule.reported(StepReport({"r": Loaded(2, 0)}), set())
    assert engine.schedule.matched_tokens(made, 0) == (0, False)


@pytest.mark.parametrize("last", ["copied", "at its end"])
def test_a_state_inside_a_block_is_saved_with_the_tokens_before_it(
    fine: Engine, caches: list[KVCache], last: str
) -> None:
    """vLLM copies the state in the step after the one that makes it, or a request ends before."""
    end = 2 * STEP + UNIT
    made = request("first", TOKENS[: end + 1])
    fine.start(made)
    saves = [save for tokens in (STEP, STEP, UNIT) for save in fine.step(made, tokens).saves]
    if last == "copied":
        saves += fine.step(made, 1, [(3, 50, end)]).saves
        saves += fine.step(made, 0).saves
    else:
        fine.schedule.offered(made, [(3, 50, end)])
        assert fine.schedule.finished(made, fine.blocks["first"])
        saves += fine.schedule.orders({}, []).saves
    assert sorted(shape(saves)) == [(0, [1]), (0, [2]), (0, [3]), (1, [50])]
    store(caches, saves)
    assert fine.start(request("again", TOKENS[: end + 1])) == end
    loads = fine.schedule.orders({}, []).loads
    assert shape(loads) == [(0, [1, 2, 3]), (1, [42])]
    assert fine.start(request("longer", TOKENS)) == end
    another = request("another", [*TOKENS[: end - 1], 7, 8, 9])
    assert fine.schedule.matched_tokens(another, 0) == (0, False)
