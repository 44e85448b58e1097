# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real engines over a pool with a disk, or with a Redis, below it. Only the server's options
differ: the engines have their usual settings, and find in the tier what the pool had to evict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from beluga_bench.vllm.process import Engine
from beluga_bench.vllm.prompts import prompt
from real_engines import (
    BLOCK,
    SAVED_S,
    TOKENS,
    Engines,
    Site,
    check_hashes,
    forget,
    made_site,
    running,
    wait_until,
)

from tests.tiers.remote_stores import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCKS = TOKENS // BLOCK
CAPACITY_PROMPTS = 3  # prompts for which the pool has space, at most


@pytest.fixture(scope="module")
def small_site(memory_root: Path, vllm_python: str, tiny_model: Path) -> Iterator[Site]:
    """A pool for three prompts, which is not served yet."""
    with made_site(memory_root, vllm_python, tiny_model) as site:
        yield site


@pytest.fixture(scope="module")
def engines(small_site: Site) -> Iterator[Engines]:
    engines = Engines(small_site)
    with running(engines.all):
        yield engines


@contextlib.contextmanager
def served(site: Site, *options: str) -> Iterator[None]:
    site.serve(*options)
    try:
        yield
    finally:
        site.kill_server()


def connect(engines: Engines, seed: int) -> None:
    """Wait until both engines use the server, which may be new to them."""
    tried = []

    def shares() -> bool:
        fresh = prompt(2 * BLOCK + 1, seed=seed + len(tried))
        tried.append(engines.saved(fresh))
        return bool(engines.b.generate(fresh)["cached_tokens"] == 2 * BLOCK)

    wait_until(shares, SAVED_S, "engines on the new server")


def evict(engines: Engines, seed: int) -> None:
    """Store other prompts until the pool has evicted as many blocks as it had."""
    stat = engines.site.stat
    had = stat().block_count
    before = stat().evict_count
    number = 0
    while stat().evict_count < before + had:
        forget(engines.a)
        engines.saved(prompt(TOKENS, seed=seed + number))
        number += 1
    assert number > CAPACITY_PROMPTS


def comes_back(engine: Engine, tokens: list[int], computed: list[int]) -> None:
    forget(engine)
    hit = engine.generate(tokens)
    assert hit["cached_tokens"] == TOKENS - 1
    assert hit["figures"]["load_blocks"] == BLOCKS
    local = engine.generate(tokens)
    assert (hit["tokens"], hit["logprobs"]) == (local["tokens"], local["logprobs"])
    assert hit["tokens"] == computed


def test_a_prompt_that_only_a_disk_has_is_loaded(engines: Engines, tmp_path: Path) -> None:
    disk = ("--disk", str(tmp_path), "--disk-bytes", "1G", "--offload", "wait")
    tokens = prompt(TOKENS, seed=40)
    computed = engines.recomputed(tokens)
    with served(engines.site, *disk):
        connect(engines, 4000)
        assert engines.saved(tokens)["cached_tokens"] == 0
        evict(engines, 4100)
        comes_back(engines.a, tokens, computed)
        evict(engines, 4200)
        comes_back(engines.b, tokens, computed)
    with served(engines.site, *disk):  # a new server finds the blocks on the disk
        connect(engines, 4300)
        evict(engines, 4400)
        comes_back(engines.a, tokens, computed)
    check_hashes(engines.site)


def test_a_prompt_that_only_redis_has_is_loaded(engines: Engines) -> None:
    store = RedisServer()
    tokens = prompt(TOKENS, seed=50)
    computed = engines.recomputed(tokens)
    try:
        with served(engines.site, "--remote", store.url, "--offload", "wait"):
            connect(engines, 5000)
            assert engines.saved(tokens)["cached_tokens"] == 0
            evict(engines, 5100)
            for engine in (engines.a, engines.b):
                comes_back(engine, tokens, computed)
                evict(engines, 5200 if engine is engines.a else 5300)
            store.kill()  # then it is a miss, with the same answer
            forget(engines.a)
            lost = engines.a.generate(tokens)
            assert lost["cached_tokens"] == 0
            assert lost["tokens"] == computed
    finally:
        store.kill()
    check_hashes(engines.site)
