# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real engines with hybrid models that are disturbed: few blocks and preemptions, aborts, resets,
other connectors before and after ours, a full pool, a disk below it. None of it ends an engine,
changes an answer or leaves a block pinned.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_engines import (
    SAVED_S,
    Site,
    answer,
    check_hashes,
    child_of,
    forget,
    hybrid_models,
    hybrid_prompt,
    made_site,
    remove,
    running,
    saved_digests,
    several,
    start_hybrid,
    wait_until,
)

from beluga import KVCache, Namespace, Pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# By model: the number of blocks of an engine, which is too small for six prompts at once.
# DeepSeek-V2 is in test_ranks.py: with latent attention on CPUs vLLM has no prefix cache of its own
# to compare with.
BLOCKS = {
    "gemma3": 30,
    "gpt_oss": 22,
    "lfm2": 24,
    "granitemoehybrid": 18,
    "qwen3_next": 14,
}
STATES = ("lfm2", "granitemoehybrid", "qwen3_next")
# vLLM's Mamba 2 for CPUs fails (an index error) in a step that begins before the end of a prompt's
# last whole block and ends behind it. So Granite's steps have space for one block and a few tokens,
# and its prompts, with their answers, end further behind a block than these and before the next.
STEPS = {"granitemoehybrid": 384 + 8}
BEHIND = range(16, 384 - 32)
POOL_BYTES = 8 << 20  # per device; there are two
# Tolerance of log-probabilities that were computed in chunks of several shapes. vLLM's short
# convolution on CPUs differs as much by what else is in a batch, without any connector, and
# recurrent layers are computed in bfloat16 only.
NEAR = dict.fromkeys(STATES, 0.3)


class Scene:
    """An engine with a few blocks and two siblings of our connector, and one without disturbance.
    Both have the same model.
    """

    def __init__(self, site: Site, model: Path, name: str) -> None:
        self.site, self.name, self._request_count = site, name, 0
        self.siblings = site.folder / f"{name}-siblings"
        self.load()
        dtype = "bfloat16" if name in STATES else "float32"
        step = STEPS.get(name, 512)
        self.calm = start_hybrid(
            site,
            model,
            f"{name}-calm",
            dtype=dtype,
            max_model_len=1536,
            max_num_batched_tokens=step,
        )
        children = [
            child_of("DictConnector", position="first"),
            site.connector("HashingConnector"),
            child_of("DictConnector", position="last"),
        ]
        self.tight = start_hybrid(
            site,
            model,
            f"{name}-tight",
            connector=None,
            dtype=dtype,
            environment={"BELUGA_TEST_SIBLINGS": str(self.siblings)},
            max_model_len=1536,
            max_num_batched_tokens=step,
            scheduler_reserve_full_isl=False,  # requests start that do not fit, and are preempted
            num_gpu_blocks_override=BLOCKS[name],
            # the module has the counters of this engine
            kv_transfer_config=several(*children) | {"kv_connector_module_path": "siblings"},
        )
        self.engines = (self.calm, self.tight)

    def load(self, **modes: str) -> None:
        """Set the behavior of the siblings."""
        self.siblings.write_text(json.dumps(modes))

    def right(self, tokens: list[int]) -> dict[int, Any]:
        """Return the answers without the pool, by the tokens that come from the engine's cache."""
        self._request_count += 1
        replies = [
            self.calm.generate(tokens, salt=f"alone {self._request_count}") for _ in range(2)
        ]
        return {reply["cached_tokens"]: answer(reply) for reply in replies}

    def check(self) -> None:
        """Check that the engines hold nothing and have loaded what was saved."""
        for engine in self.engines:
            forget(engine)
        check_hashes(self.site, salted=True)
        wait_until(lambda: self.site.pinned() == 0, SAVED_S, "all pins to go")


@pytest.fixture(scope="module")
def models(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid_models(vllm_python, tmp_path_factory.mktemp("hybrids"), *BLOCKS)


@pytest.fixture(scope="module")
def small_site(memory_root: Path, vllm_python: str, tiny_model: Path) -> Iterator[Site]:
    geometry = {"device_size": POOL_BYTES, "block_bytes": 8 << 10}
    with made_site(memory_root, vllm_python, tiny_model, **geometry) as site:
        disk = site.folder / "disk"
        disk.mkdir()
        site.serve("--disk", str(disk), "--disk-bytes", "256M", "--offload", "wait")
        yield site


@pytest.fixture(scope="module", params=BLOCKS)
def scene(request: pytest.FixtureRequest, small_site: Site, models: Path) -> Iterator[Scene]:
    scene = Scene(small_site, models / request.param, request.param)
    with running(scene.engines):
        yield scene


def distance(reply: dict[str, Any], right: dict[int, Any]) -> float:
    """Return the largest difference between log-probabilities of the first token's candidates."""
    ours, theirs = reply["logprobs"], right[0][1]
    both = ours.keys() & theirs.keys()
    return max(abs(ours[key] - theirs[key]) for key in both) if len(both) > 2 else float("inf")


def prompts(scene: Scene, seed: int, count: int) -> list[list[int]]:
    """Return prompts of several lengths, some of which share a prefix."""
    chance = random.Random(seed)
    shared = hybrid_prompt(scene.name, seed=seed)
    tokens = [hybrid_prompt(scene.name, seed=seed + 1 + number) for number in range(count // 2)]
    tokens += [shared[: chance.randint(600, 900)] + prompt[:200] for prompt in tokens]
    return [fitting(scene.name, prompt[: chance.randint(700, len(prompt))]) for prompt in tokens]


def fitting(name: str, tokens: list[int]) -> list[int]:
    """Return as many of the tokens as vLLM can compute as a prompt."""
    if name in STEPS:
        while len(tokens) % 384 not in BEHIND:
            tokens = tokens[:-1]
    return tokens


def test_other_connectors_do_not_change_the_output(scene: Scene) -> None:
    tokens = hybrid_prompt(scene.name, seed=20)
    right = scene.right(tokens)
    modes = [
        {"first": "off", "last": "off"},
        {"first": "async"},
        {"last": "async"},
        {"first": "fail"},
        {"last": "fail"},
    ]
    if scene.name not in STATES:  # a state that vLLM loads before a forward is too late for it
        modes += [{"first": "sync"}, {"last": "sync"}]
    assert scene.tight.generate(tokens)["cached_tokens"] == 0
    loads = 0
    for mode in modes:
        forget(scene.tight)
        scene.load(**mode)
        reply = scene.tight.generate(tokens)
        assert answer(reply) == right[reply["cached_tokens"]], mode
        loads += reply["figures"]["sibling_loads"]
        if "last" in mode or mode["first"] == "off":
            assert reply["figures"]["load_blocks"] > 0
    assert loads >= 2
    scene.load()
    reply = scene.calm.generate(tokens)
    assert reply["figures"]["load_blocks"] > 0
    assert answer(reply) == right[reply["cached_tokens"]]
    scene.check()


def test_blocks_loaded_by_another_connector_are_saved_correctly(scene: Scene) -> None:
    first, second = prompts(scene, 30, 2)
    scene.tight.generate(first)
    forget(scene.tight)
    forget_pool(scene)
    scene.load(first="async")
    longer = fitting(scene.name, first + second[:300])
    assert scene.tight.generate(longer)["figures"]["sibling_loads"] == 1
    scene.load()
    forget(scene.tight)
    right = scene.right(longer)
    reply = scene.calm.generate(longer)
    assert distance(reply, right) < NEAR.get(scene.name, 1e-3)
    scene.check()


def test_preempted_requests_are_saved_and_have_correct_output(scene: Scene) -> None:
    requested = prompts(scene, 40, 8)
    before = scene.tight.call("figures")["figures"]["preempted"]
    for _ in range(2):
        forget(scene.tight)
        replies = scene.tight.call("generate", prompts=requested, max_tokens=24)
        assert len(replies["outputs"]) == len(requested)
    assert scene.tight.call("figures")["figures"]["preempted"] > before
    for tokens in requested[:4]:
        right = scene.right(tokens)
        forget(scene.tight)
        reply = scene.tight.generate(tokens)
        assert distance(reply, right) < NEAR.get(scene.name, 1e-3)
    scene.check()


@pytest.mark.parametrize("how", ["abort", "reset", "reset_connector"])
def test_interrupted_requests_leave_nothing_behind(scene: Scene, how: str) -> None:
    requested = prompts(scene, {"abort": 50, "reset": 60, "reset_connector": 70}[how], 4)
    right = scene.right(requested[0])
    for steps in (1, 2, 3, 5):  # while it computes or loads
        result = scene.tight.call("interrupt", prompts=requested, steps=steps, how=how)
        assert all(result["tokens"]) == (how != "abort")
        reply = scene.tight.generate(requested[0])
        assert distance(reply, right) < NEAR.get(scene.name, 1e-3)
        forget(scene.tight)
    scene.check()


def test_a_prompt_that_only_a_disk_has_is_loaded(scene: Scene) -> None:
    tokens = hybrid_prompt(scene.name, seed=90)
    right = scene.right(tokens)
    scene.calm.generate(tokens)
    forget(scene.calm)
    sink(scene, 91)
    reply = scene.calm.generate(tokens)
    assert reply["cached_tokens"] == max(right)
    assert reply["figures"]["load_blocks"] > 0
    assert answer(reply) == right[reply["cached_tokens"]]
    scene.check()


def test_a_full_pool_only_costs_time(scene: Scene) -> None:
    tokens = hybrid_prompt(scene.name, seed=95)
    right = scene.right(tokens)
    with Pool.open(scene.site.paths) as pool, KVCache(pool, namespace=Namespace({"f": 1})) as cache:
        fill(cache)
        for _ in range(2):
            reply = scene.calm.generate(tokens)
            assert answer(reply) == right[reply["cached_tokens"]]
            forget(scene.calm)
        assert scene.calm.call("figures")["figures"]["save_skipped_blocks"] > 0
    scene.calm.generate(tokens)
    forget(scene.calm)
    reply = scene.calm.generate(tokens)
    assert reply["cached_tokens"] == max(right)
    assert answer(reply) == right[reply["cached_tokens"]]
    scene.check()


def forget_pool(scene: Scene) -> None:
    """Remove all blocks from the pool and the disk, of every engine."""
    remove(scene.site, *dict.fromkeys(saved_digests(scene.site)))


def sink(scene: Scene, seed: int) -> None:
    """Save other prompts until the pool has evicted all earlier blocks."""
    before = scene.site.stat()
    for number in range(40):
        scene.calm.generate(hybrid_prompt(scene.name, seed=1000 * seed + number))
        forget(scene.calm)
        if scene.site.stat().evict_count >= before.evict_count + before.block_count:
            return
    raise AssertionError("the pool has space for 40 prompts")


def fill(cache: KVCache) -> None:
    """Fill the pool with blocks that are pinned, so that none is evicted."""
    for size in (256 << 10, 16 << 10):
        for number in range(1000):
            key = number.to_bytes(16, "big") + size.to_bytes(16, "big")
            result = cache.put([key], [np.zeros(size, np.uint8)])
            if result.refused:
                break
            cache.pin([key])
