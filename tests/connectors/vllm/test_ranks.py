# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines of two ranks: each rank has its own keys, and a hit is what both have."""

from __future__ import annotations

import pytest
from beluga_bench.harness.machine import cores
from beluga_bench.vllm.process import Engine
from beluga_bench.vllm.prompts import prompt

from beluga import Pool
from beluga.index import MetaClient
from beluga.rpc import Client
from tests.connectors.vllm.conftest import TOKENS, Site, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCKS = TOKENS // 128


def stored(site: Site) -> int:
    """Return how many blocks the pool has."""
    with Pool.open(site.paths) as pool, Client(pool, timeout_s=5) as client:
        return MetaClient(client).stat().block_count


def test_two_ranks_save_and_load_their_own_parts(site: Site) -> None:
    """A third engine, of one rank, finds none of them."""
    engines: list[Engine] = []
    try:
        first, last = cores()[0], cores()[-1]
        ranked = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        bound = {"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{last}", "OMP_NUM_THREADS": "1"}
        for name in ("a", "b"):
            engines.append(site.engine(name, connector={}, environment=bound, **ranked))
            engines[-1].ready()
        alone = site.engine("alone", connector={})
        engines.append(alone)
        alone.ready()
        a, b = engines[:2]
        tokens = prompt(TOKENS, seed=1)
        miss = a.generate(tokens)

        def saved() -> bool:
            a.ask("idle")
            return stored(site) >= 2 * BLOCKS

        wait_until(saved, 60, "both ranks' blocks in the pool")
        hit = b.generate(tokens)
        assert hit["cached_tokens"] == TOKENS - 1
        local = b.generate(tokens)
        assert (hit["tokens"], hit["logprobs"]) == (local["tokens"], local["logprobs"])
        assert hit["tokens"] == miss["tokens"]
        assert alone.generate(tokens)["cached_tokens"] == 0
    finally:
        for engine in engines:
            engine.kill()
