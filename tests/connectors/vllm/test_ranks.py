# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines of two ranks and of one: each rank loads its own heads; equal bytes are stored once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from beluga_bench.harness.machine import cores
from beluga_bench.vllm.process import Engine
from beluga_bench.vllm.prompts import prompt
from real_engines import (
    BLOCK,
    TOKENS,
    Site,
    answer,
    check_hashes,
    forget,
    hybrid_models,
    small,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCKS = TOKENS // BLOCK
HIT = TOKENS - 1
CLOSE = 1e-3  # ranks add in another order
# vLLM's rotary kernel for CPUs reads and writes wrong places of a part of a wider tensor, which the
# rotated part of a latent query is. Its answers then depend on the number of ranks, and differ
# between a hit and a miss of one engine (by 0.3). The same operation in PyTorch is exact.
EXACT_ROTATION = {"custom_ops": ["all", "-rotary_embedding"]}


def of_two_ranks(site: Site, name: str, **options: Any) -> Engine:
    first, last = cores()[0], cores()[-1]
    return site.engine(
        name,
        connector={},
        environment={"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{last}", "OMP_NUM_THREADS": "1"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **options,
    )


def stored(
    site: Site, engine: Engine, tokens: list[int], blocks: int, salt: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Compute a prompt, and wait until the pool has that many more blocks. Returns the additional
    bytes in the pool, and the engine's answer from its own cache.
    """
    before = site.stat()
    assert engine.generate(tokens, salt=salt)["cached_tokens"] == 0

    def saved() -> bool:
        engine.call("idle")
        return site.stat().block_count >= before.block_count + blocks

    wait_until(saved, 60, f"{blocks} more blocks in the pool")
    after = site.stat()
    assert after.block_count == before.block_count + blocks
    local = engine.generate(tokens, salt=salt)
    assert local["cached_tokens"] == HIT
    return after.block_bytes - before.block_bytes, local


def assert_hits(engine: Engine, tokens: list[int], like: dict[str, Any]) -> None:
    """Check that an engine finds a prompt that another one has computed, and gets its answer. The
    loaded blocks also serve the next request, bit for bit.
    """
    far = engine.generate(tokens)
    assert far["cached_tokens"] == HIT
    near = engine.generate(tokens)
    assert answer(near) == answer(far)
    assert far["tokens"] == like["tokens"]
    common = far["logprobs"].keys() & like["logprobs"].keys()
    assert len(common) >= len(like["logprobs"]) - 1  # the last candidates may be equally likely
    for token in common:
        assert far["logprobs"][token] == pytest.approx(like["logprobs"][token], abs=CLOSE)


@pytest.fixture(scope="module")
def engines(site: Site) -> Iterator[list[Engine]]:
    """Two engines of two ranks, and one of one rank."""
    made: list[Engine] = []
    try:
        for name in "ab":
            made.append(of_two_ranks(site, name))
            made[-1].ready()
        made.append(site.engine("alone", connector={}))
        made[-1].ready()
        yield made
    finally:
        for engine in made:
            engine.kill()


def test_two_ranks_save_and_load_their_own_parts(site: Site, engines: list[Engine]) -> None:
    a, b, _ = engines
    tokens = prompt(TOKENS, seed=1)
    _, local = stored(site, a, tokens, 2 * BLOCKS)
    assert_hits(b, tokens, local)


def test_two_ranks_and_one_find_each_other_s_blocks(site: Site, engines: list[Engine]) -> None:
    two, _, single = engines
    tokens = prompt(TOKENS, seed=2)
    _, local = stored(site, two, tokens, 2 * BLOCKS)
    assert_hits(single, tokens, local)
    tokens = prompt(TOKENS, seed=3)
    _, local = stored(site, single, tokens, BLOCKS)
    assert_hits(two, tokens, local)
    forget(two)  # what was loaded is not saved again
    assert_hits(two, tokens, local)


def test_latent_attention_is_stored_once_for_all_ranks(
    site: Site, vllm_python: str, tmp_path: Path
) -> None:
    options = {
        "model": str(hybrid_models(vllm_python, tmp_path, "deepseek_v2") / "deepseek_v2"),
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "compilation_config": EXACT_ROTATION,
        "attention_backend": "CPU_MLA",  # the backend for CPUs with AMX has no float32
    }
    engines: list[Engine] = []
    try:
        engines.append(of_two_ranks(site, "latent-two", **options))
        engines[-1].ready()
        engines.append(site.engine("latent-one", connector={}, **options))
        engines[-1].ready()
        two, single = engines
        blocks = HIT // 16  # of 16 tokens
        for seed, storer, finder in ((4, two, single), (5, single, two)):
            tokens = small(TOKENS, seed)
            _, own = stored(site, finder, tokens, blocks, salt="own")
            size, local = stored(site, storer, tokens, blocks)
            assert size == HIT * 3 * (512 + 64) * 4  # tokens, layers, values, bytes
            assert_hits(finder, tokens, own)
            assert_hits(finder, tokens, local)
            forget(storer)
            again = storer.generate(tokens)
            assert answer(again) == answer(local)
        check_hashes(site)  # each rank has exactly the bytes that one of the others stored
    finally:
        for engine in engines:
            engine.kill()
