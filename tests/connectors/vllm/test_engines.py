# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real engines on one pool, with faults between them: KV is never wrong.

Weights are float32. Then what an engine computes after a hit equals what it computes without a
cache, token by token, and the tests can compare. (In bfloat16 it does not, even with vLLM's own
prefix cache, because chunks of other shapes are rounded differently.)
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
from beluga_bench.vllm.process import ChildError, Engine
from beluga_bench.vllm.prompts import prompt
from support.forge import read, write

from beluga import Pool
from tests.connectors.vllm.conftest import TOKENS, Site, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 128
SAVED_S = 60.0


class Engines:
    """Three engines: one only computes, one saves and loads, and one loads in parallel to its
    forward passes.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.plain = site.engine("plain", connector=None)
        self.a = site.engine("a", connector={})
        self.b = site.engine("b", connector={"load": "async"})
        self.all = (self.plain, self.a, self.b)

    def recomputed(self, tokens: list[int]) -> list[int]:
        """Return the answer of an engine without any cache."""
        forget(self.plain)
        answer: list[int] = self.plain.generate(tokens)["tokens"]
        return answer

    def saved(self, tokens: list[int], engine: Engine | None = None) -> dict[str, Any]:
        """Compute a prompt and save its blocks."""
        engine = engine or self.a
        before = done(engine)
        reply = engine.generate(tokens)
        wanted = len(tokens) // BLOCK - reply["cached_tokens"] // BLOCK
        wait_until(lambda: done(engine) >= before + wanted, SAVED_S, "saving")
        return reply


def done(engine: Engine) -> float:
    """Return how many blocks need no save any more, for any reason."""
    engine.call("idle")
    figures = engine.call("figures")["figures"]
    return (
        sum(figures[f"save_{what}_blocks"] for what in ("present", "skipped"))
        + (figures["save_blocks"])
    )


@pytest.fixture(scope="module")
def engines(site: Site) -> Iterator[Engines]:
    engines = Engines(site)
    try:
        for engine in engines.all:
            engine.ready()
        yield engines
    finally:
        for engine in engines.all:
            engine.kill()


def forget(engine: Engine) -> None:
    """Empty the engine's own prefix cache after its saves have ended."""

    def emptied() -> bool:
        engine.call("idle")
        return bool(engine.call("reset")["reset"])

    wait_until(emptied, SAVED_S, "the engine's own cache to be emptied")


def check_hashes(site: Site, *, salted: bool = False, since: int = 0) -> int:
    """Check that every loaded block has exactly the bytes that were saved under its name, and that
    no two names that were saved after line ``since`` have the same bytes, except for prompts that
    were ``salted``. Returns how many loads there were.
    """
    saved: dict[str, set[str]] = {}
    recent: set[str] = set()
    loads = 0
    for number, line in enumerate(site.hashes.read_text().splitlines()):
        what, digest, content = line.split()
        if what == "save":
            saved.setdefault(digest, set()).add(content)
            if number >= since and not salted:
                recent.add(digest)
        else:
            loads += 1
            assert content in saved.get(digest, set()), f"{digest}: loaded what nobody saved"
    owner: dict[str, str] = {}
    for digest in recent:
        for content in saved[digest]:
            assert owner.setdefault(content, digest) == digest, "one block under two names"
    return loads


def test_a_second_engine_hits_blocks_saved_by_the_first(engines: Engines) -> None:
    tokens = prompt(TOKENS, seed=1)
    miss = engines.saved(tokens)
    assert miss["cached_tokens"] == 0
    hit = engines.b.generate(tokens)
    assert hit["cached_tokens"] == TOKENS - 1
    assert hit["figures"]["load_blocks"] == TOKENS // BLOCK
    local = engines.b.generate(tokens)
    assert (hit["tokens"], hit["logprobs"]) == (local["tokens"], local["logprobs"])
    assert hit["tokens"] == engines.recomputed(tokens)


def test_a_longer_prompt_is_hit_as_far_as_it_was_computed(engines: Engines) -> None:
    tokens = prompt(TOKENS, seed=2)
    engines.saved(tokens[: 5 * BLOCK + 7])
    longer = engines.saved(tokens, engines.b)
    assert longer["cached_tokens"] == 5 * BLOCK
    assert longer["tokens"] == engines.recomputed(tokens)
    forget(engines.a)
    again = engines.a.generate(tokens)
    assert again["cached_tokens"] == TOKENS - 1
    assert again["tokens"] == longer["tokens"]


def test_fifty_requests_at_once_with_shared_prefixes(engines: Engines) -> None:
    """These exceed the pool and an engine, and cause evictions, preemptions and queues."""
    chance = random.Random(4)
    shared = [prompt(chance.randint(2, 7) * BLOCK, seed=100 + i) for i in range(10)]
    tokens = [
        chance.choice(shared) + prompt(chance.randint(1, 3 * BLOCK), seed=200 + i)
        for i in range(50)
    ]
    before = check_hashes(engines.site)
    for turn in range(2):
        for engine in (engines.a, engines.b):
            forget(engine)
            engine.send("generate", prompts=chance.sample(tokens, 50), max_tokens=4)
        for engine in (engines.a, engines.b):
            assert len(engine.reply(600)["outputs"]) == 50, turn
    assert check_hashes(engines.site) > before
    for engine in (engines.a, engines.b):
        figures = engine.call("figures")["figures"]
        assert figures["load_blocks"] > 0
    for prompt_tokens in chance.sample(
        tokens, 8
    ):  # one at a time, so that the answers are the same, too
        forget(engines.b)
        assert engines.b.generate(prompt_tokens)["tokens"] == engines.recomputed(prompt_tokens)
    check_hashes(engines.site)


def test_a_killed_server_only_costs_misses(engines: Engines) -> None:
    tokens = prompt(TOKENS, seed=5)
    engines.saved(tokens)
    engines.site.kill_server()
    for engine in (engines.a, engines.b):
        forget(engine)
        assert engine.generate(tokens)["tokens"] == engines.recomputed(tokens)
        assert engine.generate(prompt(TOKENS, seed=6))["cached_tokens"] == 0
    engines.site.serve()
    saved = []

    def shared_again() -> bool:
        fresh = prompt(2 * BLOCK + 1, seed=700 + len(saved))
        saved.append(engines.saved(fresh))
        return bool(engines.b.generate(fresh)["cached_tokens"] == 2 * BLOCK)

    wait_until(shared_again, SAVED_S, "engines on the new server")
    forget(engines.b)
    engines.b.generate(tokens)  # blocks committed before the kill are whole or evicted
    check_hashes(engines.site)


def dies(engine: Engine, prompts: list[list[int]]) -> None:
    """Compute one prompt after the other until the engine is dead."""
    counted = {}
    with contextlib.suppress(ChildError):
        for tokens in prompts:
            forget(engine)
            engine.generate(tokens)
            counted = engine.call("figures")["figures"]
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not engine.running, 5, "the crash point")
    assert not engine.running, f"{counted}\n{engine.log()[-4000:]}"


def test_engines_killed_while_they_save_and_load_leave_a_clean_pool(engines: Engines) -> None:
    """An engine that saves dies in the middle of a block, and one that loads dies with pins."""
    site = engines.site
    saver = site.engine("saver", connector={}, crash="put.payload_streamed:3:kill")
    loader = site.engine("loader", connector={"salt": "tenant"}, crash="get.copied:1:kill")
    try:
        saver.ready()
        loader.ready()
        tokens = prompt(TOKENS, seed=8)
        engines.saved(tokens)
        assert engines.b.generate(tokens)["cached_tokens"] == TOKENS - 1
        dies(saver, [prompt(TOKENS, seed=900 + turn) for turn in range(6)])
        assert loader.generate(tokens)["cached_tokens"] == 0, "another tenant's blocks were found"
        dies(loader, [tokens] * 6)  # finds the blocks that it has saved itself
        wait_until(lambda: site.pinned() == 0, 30, "the dead engine's pins to go")
    finally:
        saver.kill()
        loader.kill()
    checked = site.check()
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for seed in (8, 900):
        tokens = prompt(TOKENS, seed=seed)
        forget(engines.b)
        assert engines.b.generate(tokens)["tokens"] == engines.recomputed(tokens)
    check_hashes(site)


def test_damaged_blocks_are_computed_again(engines: Engines) -> None:
    """This is the last test here, because its damage in other prompts' blocks remains."""
    prompts = {engines.a: prompt(TOKENS, seed=3), engines.b: prompt(TOKENS, seed=33)}
    for tokens in prompts.values():
        engines.saved(tokens)
    with Pool.open(engines.site.paths) as pool:
        geometry = pool.geometry
        for offset in range(geometry.data_offset, geometry.size, 64 << 10):
            line = read(pool, offset)
            write(pool, offset, bytes([line[0] ^ 1]) + line[1:])
    for engine, tokens in prompts.items():  # before the forward, and during others
        forget(engine)
        reply = engine.generate(tokens)
        assert reply["figures"]["mismatches"] >= 1
        assert reply["figures"]["load_failed_blocks"] >= 1
        assert reply["tokens"] == engines.recomputed(tokens)
