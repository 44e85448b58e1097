# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real engines with hybrid models on one pool: a hit from the pool equals one in the engine's own
cache, bit for bit, and costs as few bytes as vLLM's rules allow.

Equal tokens are not enough. A state that is loaded too late changes the log-probabilities, but with
small models rarely the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from beluga_bench.vllm.process import Engine
from real_engines import (
    SAVED_S,
    Site,
    answer,
    check_hashes,
    forget,
    hybrid_models,
    hybrid_prompt,
    remove,
    running,
    saved_digests,
    start_hybrid,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = 128 * 2 * 2 * 64 * 2  # of a layer: tokens, K and V, heads, their size, bytes
# By model: the tokens of a hit, the blocks that it loads, and their bytes.
HITS = {
    "gemma3": (1024, 8 + 2 * 2, (8 + 2 * 2) * 2 * PAGE),  # two blocks in each window
    "gpt_oss": (1024, 8 + 1, (8 + 1) * 2 * PAGE),
    "lfm2": (1024, 8 + 3, 8 * PAGE + 3 * 1024),  # the states, without padding
    "granitemoehybrid": (768, 2 + 3, 2 * 3 * PAGE + 3 * 134_912),
    "qwen3_next": (640, 1 + 3, 5 * PAGE + 3 * 268_288),
}


@pytest.fixture(scope="module")
def models(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid_models(vllm_python, tmp_path_factory.mktemp("hybrids"), *HITS)


@pytest.fixture(scope="module", params=HITS)
def pair(
    request: pytest.FixtureRequest, site: Site, models: Path
) -> Iterator[tuple[str, Engine, Engine]]:
    """Two engines with the same model."""
    name = request.param
    engines = [start_hybrid(site, models / name, f"{name}-{suffix}") for suffix in "ab"]
    with running(engines):
        yield name, engines[0], engines[1]


def test_a_hit_in_the_pool_equals_a_hit_in_the_engines_cache(
    site: Site, pair: tuple[str, Engine, Engine]
) -> None:
    name, a, b = pair
    # Other tests salted the prompts of engines on this site.
    since = len(site.hashes.read_text().splitlines()) if site.hashes.exists() else 0
    tokens = hybrid_prompt(name, seed=7)
    cached, blocks, size = HITS[name]
    assert a.generate(tokens)["cached_tokens"] == 0
    local = a.generate(tokens)
    assert local["cached_tokens"] == cached
    forget(a)  # this waits until the engine holds nothing for saves
    far = b.generate(tokens)
    assert (far["cached_tokens"], far["figures"]["load_blocks"]) == (cached, blocks)
    assert far["figures"]["load_bytes"] == size
    assert answer(far) == answer(local)
    assert answer(b.generate(tokens)) == answer(local)  # the loaded blocks serve the next request
    near = a.generate(tokens)
    assert near["figures"]["load_blocks"] == blocks
    assert answer(near) == answer(local)
    longer = tokens + tokens[:300]
    assert b.generate(longer)["cached_tokens"] == cached
    grown = b.generate(longer)
    forget(b)
    again = a.generate(longer)
    assert again["figures"]["load_blocks"] > 0
    assert answer(again) == answer(grown)
    check_hashes(site, since=since)
    wait_until(lambda: site.pinned() == 0, SAVED_S, "all pins to go")


def test_a_common_prefix_is_resumed_from_the_pool(
    site: Site, pair: tuple[str, Engine, Engine]
) -> None:
    """The second of them exceeds the engine's own cache; vLLM keeps windows and states there."""
    name, a, b = pair
    common = hybrid_prompt(name, seed=10)[: HITS[name][0]]
    first, second, third = (common + hybrid_prompt(name, seed=seed)[:300] for seed in (11, 12, 13))
    for each in (first, second):
        a.generate(each, salt="local")
        a.generate(each)
    local = a.generate(third, salt="local")
    assert local["cached_tokens"] == len(common)
    far = b.generate(third)
    assert far["cached_tokens"] == len(common)
    assert answer(far) == answer(local)


def test_blocks_evicted_from_any_group_only_cost_time(
    site: Site, pair: tuple[str, Engine, Engine]
) -> None:
    name, a, b = pair
    tokens = hybrid_prompt(name, seed=8)
    before = len(saved_digests(site))
    cold = a.generate(tokens)
    forget(a)
    digests = saved_digests(site)[before:]
    warm = b.generate(tokens)
    for digest in digests:
        assert remove(site, digest) == 1
        forget(b)
        reply = b.generate(tokens)
        assert answer(reply) == answer(warm if reply["cached_tokens"] else cold)
        assert reply["figures"]["load_failed_blocks"] == 0
    check_hashes(site, salted=True)


def test_damaged_blocks_and_a_killed_server_only_cost_time(
    site: Site, pair: tuple[str, Engine, Engine]
) -> None:
    name, a, b = pair
    tokens = hybrid_prompt(name, seed=9)
    cold = a.generate(tokens)
    forget(a)
    site.damage(4 << 10)
    reply = b.generate(tokens)
    assert reply["figures"]["mismatches"] >= 1
    assert reply["cached_tokens"] == 0
    assert answer(reply) == answer(cold)
    forget(b)
    site.kill_server()
    assert answer(b.generate(tokens)) == answer(cold)
    site.serve()


@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen3_next"])
@pytest.mark.parametrize("count", [1, 8])
def test_a_prompt_is_resumed_inside_a_block(
    fine: Callable[[str], Engine], site: Site, name: str, count: int
) -> None:
    """With --prefix-match-unit vLLM keeps a copy of the state there. A request of one token ends
    before vLLM copies it.
    """
    engine, tokens = fine(name), hybrid_prompt(name, seed=20 + count)
    assert engine.generate(tokens, max_tokens=count)["cached_tokens"] == 0
    local = engine.generate(tokens)
    assert local["cached_tokens"] == 1024
    forget(engine)
    far = engine.generate(tokens)
    assert far["cached_tokens"] == 1024
    assert answer(far) == answer(local)
    forget(engine)
    shorter = engine.generate(tokens[: HITS[name][0] + 1])
    assert shorter["cached_tokens"] in (0, HITS[name][0])
    wait_until(lambda: site.pinned() == 0, SAVED_S, "all pins to go")


@pytest.fixture(scope="module")
def fine(site: Site, models: Path) -> Iterator[Callable[[str], Engine]]:
    """A function that starts an engine which matches prefixes by units of 128 tokens."""
    made: dict[str, Engine] = {}

    def start_once(name: str) -> Engine:
        if name not in made:
            made[name] = start_hybrid(site, models / name, f"{name}-fine", prefix_match_unit=128)
            made[name].ready()
        return made[name]

    yield start_once
    for engine in made.values():
        engine.kill()


def test_each_adapter_has_separate_blocks_of_a_hybrid_model(site: Site, models: Path) -> None:
    engine = start_hybrid(site, models / "gemma3", "adapters", enable_lora=True, max_lora_rank=8)
    tokens = hybrid_prompt("gemma3", seed=14)
    with running([engine]):
        answers = []
        for adapter in (None, *(str(models / f"gemma3-adapter-{number}") for number in (1, 2))):
            shared = functools.partial(_hits, engine, adapter)
            wait_until(shared, SAVED_S, "the adapter's identity")
            forget(engine)
            assert engine.generate(tokens, adapter=adapter)["cached_tokens"] == 0
            local = engine.generate(tokens, adapter=adapter)
            forget(engine)
            far = engine.generate(tokens, adapter=adapter)
            assert (far["cached_tokens"], far["figures"]["load_blocks"]) == HITS["gemma3"][:2]
            assert answer(far) == answer(local)
            answers.append(answer(far))
        assert answers[0] != answers[1] != answers[2] != answers[0]


def _hits(engine: Engine, adapter: str | None) -> bool:
    """Return whether blocks of an adapter are shared."""
    tokens = hybrid_prompt("gemma3", seed=15)
    engine.generate(tokens, adapter=adapter)
    forget(engine)
    return bool(engine.generate(tokens, adapter=adapter)["cached_tokens"])
