# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real engines on one pool, with faults between them: KV is never wrong, and each saved block is
announced once.

Weights are float32. Then what an engine computes after a hit equals what it computes without a
cache, token by token, and the tests can compare. (In bfloat16 it does not, even with vLLM's own
prefix cache, because chunks of other shapes are rounded differently.)
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest
from beluga_bench.vllm.process import ChildError, Engine
from beluga_bench.vllm.prompts import prompt
from real_engines import (
    BLOCK,
    FOLDER,
    SAVED_S,
    TOKENS,
    Engines,
    Site,
    check_hashes,
    forget,
    running,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_saved_blocks_are_announced_once(site: Site) -> None:
    endpoint = f"ipc://{site.folder}/events"
    received = site.folder / "events.log"
    command = [site.python, FOLDER / "vllm_role.py", "subscribe", endpoint]
    with received.open("w") as log:
        subscriber = subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL)
    engine = site.engine(
        "announcer",
        connector={},
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
        },
    )

    def shared() -> Counter[tuple[int, ...]]:
        lines = [json.loads(line) for line in received.read_text().splitlines()[1:]]
        assert all(line[2:] == [BLOCK, "full_attention"] for line in lines)
        return Counter(tuple(tokens) for medium, tokens, *_ in lines if medium == "SHARED")

    with contextlib.ExitStack() as stack:
        stack.callback(subscriber.wait)
        stack.callback(subscriber.kill)
        stack.enter_context(running([engine]))
        wait_until(lambda: received.read_text().startswith("ready"), 120, "the subscriber")
        tokens = prompt(TOKENS, seed=1)
        blocks = {tuple(tokens[i : i + BLOCK]) for i in range(0, TOKENS - 1, BLOCK)}
        engine.generate(tokens)

        def announced() -> bool:
            engine.call("idle")  # a worker reports its saves with the next step
            engine.generate(tokens[:5])
            return set(shared()) == blocks

        wait_until(announced, 60, f"{len(blocks)} blocks; received: {received.read_text()[:500]}")
        assert set(shared().values()) == {1}
        engine.generate(tokens)  # the blocks are offered again but are not new
        engine.generate(tokens[:5])
        assert set(shared().values()) == {1}


def test_llm_d_credits_what_an_engine_saved_to_another_worker(site: Site) -> None:
    zmq = pytest.importorskip("zmq")
    from tests.events.foreign import LlmdRouter

    live, replay = (f"ipc://{site.folder}/{name}" for name in ("live", "again"))
    site.kill_server()
    site.serve("--events", live, "--events-replay", replay, "--events-form", "llm-d")
    engine = site.engine("saver", connector={"events_replay": replay, "announce": False})
    tokens = prompt(TOKENS, seed=2)
    with zmq.Context() as context, running([engine]):
        router = LlmdRouter(context, live, replay, block_size=BLOCK)

        def credited() -> list[int]:
            engine.call("idle")
            engine.generate(tokens[:5])
            scores = router.poll().index.score(tokens, site.model_name, ["saver", "other"])
            return list(scores.values())

        engine.generate(tokens)
        blocks = len(tokens) // BLOCK
        wait_until(lambda: credited() == [blocks, blocks], 60, "the credit of both workers")
        site.remove_all()
        wait_until(lambda: credited() == [0, 0], 60, "no credit")
        router.close()
    site.kill_server()
    site.serve()


@pytest.fixture(scope="module")
def engines(site: Site) -> Iterator[Engines]:
    engines = Engines(site)
    with running(engines.all):
        yield engines


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
    with running([saver, loader]):
        tokens = prompt(TOKENS, seed=8)
        engines.saved(tokens)
        assert engines.b.generate(tokens)["cached_tokens"] == TOKENS - 1
        dies(saver, [prompt(TOKENS, seed=900 + turn) for turn in range(6)])
        assert loader.generate(tokens)["cached_tokens"] == 0, "another tenant's blocks were found"
        dies(loader, [tokens] * 6)  # finds the blocks that it has saved itself
        wait_until(lambda: site.pinned() == 0, 30, "the dead engine's pins to go")
    checked = site.check()
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for seed in (8, 900):
        tokens = prompt(TOKENS, seed=seed)
        forget(engines.b)
        assert engines.b.generate(tokens)["tokens"] == engines.recomputed(tokens)
    check_hashes(site)


def test_damaged_blocks_are_computed_again(engines: Engines) -> None:
    """This is the last test with these engines, because its damage in other prompts' blocks
    remains.
    """
    prompts = {engines.a: prompt(TOKENS, seed=3), engines.b: prompt(TOKENS, seed=33)}
    for tokens in prompts.values():
        engines.saved(tokens)
    engines.site.damage()
    for engine, tokens in prompts.items():  # before the forward, and during others
        forget(engine)
        reply = engine.generate(tokens)
        assert reply["figures"]["mismatches"] >= 1
        assert reply["figures"]["load_failed_blocks"] >= 1
        assert reply["tokens"] == engines.recomputed(tokens)
