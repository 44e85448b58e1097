# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Two real engines whose OffloadingConnector uses the pool through our OffloadingSpec.

Weights are float32, so that a hit's output also equals the one computed without a cache.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from beluga_bench.vllm.model import SIZES
from beluga_bench.vllm.process import Engine, options_of
from beluga_bench.vllm.prompts import prompt
from forge import read, write

from beluga import Client, MetaServer, Pool
from beluga.index import MetaClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # the packages may have to be downloaded

TOKENS, BLOCK = 1281, 128
SAVED_S = 120.0


@dataclasses.dataclass
class Site:
    """A pool, its server, and two engines."""

    pool: Pool
    server: MetaServer
    engines: tuple[Engine, Engine]

    def committed(self) -> int:
        with Client(self.pool, timeout_s=30) as client:
            return MetaClient(client).stat().commit_count

    def pinned(self) -> int:
        with Client(self.pool, timeout_s=30) as client:
            return MetaClient(client).stat().pinned_count

    def saved(self, engine: Engine, tokens: list[int]) -> dict[str, Any]:
        """Have a prompt computed and its blocks saved."""
        wanted = self.committed() + len(tokens) // BLOCK
        reply = engine.generate(tokens)
        deadline = time.monotonic() + SAVED_S
        while self.committed() < wanted:
            assert time.monotonic() < deadline, engine.log()
            engine.ask("idle")
            time.sleep(0.05)
        return reply


@pytest.fixture(scope="module")
def site(memory_root: Path, vllm_python: str, tiny_model: Path) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="beluga-offloading-", dir=memory_root))
    paths = [folder / "a", folder / "b"]
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "BelugaOffloadingSpec",
            "spec_module_path": "beluga.connectors.vllm.offloading",
            "pool": ":".join(map(str, paths)),
            "timeout_ms": 5000,
            "retry_s": 0.1,
        },
    }
    options = options_of(
        tiny_model, SIZES["tiny"], tokens=TOKENS, connector=connector, dtype="float32"
    )
    try:
        with (
            Pool.create(paths, device_size=48 << 20, sparse=True) as pool,
            MetaServer(pool) as server,
            Engine(options, log=folder / "a.log", python=vllm_python) as a,
            Engine(options, log=folder / "b.log", python=vllm_python) as b,
        ):
            for engine in (a, b):
                engine.ready()
                met = functools.partial(lambda one: "beluga: met 1 of" in one.log(), engine)
                engine.wait_for(met, SAVED_S, "word of its rank")
            yield Site(pool, server, (a, b))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def answer(reply: dict[str, Any]) -> tuple[Any, Any]:
    return reply["tokens"], reply["logprobs"]


def test_one_engine_saves_and_the_other_hits(site: Site) -> None:
    a, b = site.engines
    tokens = prompt(TOKENS, seed=1)
    miss = site.saved(a, tokens)
    assert miss["cached_tokens"] == 0
    hit = b.generate(tokens)
    assert hit["cached_tokens"] == TOKENS - 1
    local = b.generate(tokens)
    assert local["cached_tokens"] == TOKENS - 1
    assert answer(hit) == answer(local)
    assert hit["tokens"] == miss["tokens"]
    b.ask("idle")
    assert site.pinned() == 0


def test_a_longer_prompt_is_hit_as_far_as_it_was_saved(site: Site) -> None:
    a, b = site.engines
    tokens = prompt(TOKENS, seed=2)
    site.saved(a, tokens[: 4 * BLOCK + 9])
    longer = b.generate(tokens)
    assert longer["cached_tokens"] == 4 * BLOCK
    assert longer["tokens"] == a.generate(tokens)["tokens"]


def test_a_block_that_was_damaged_is_computed_again(site: Site) -> None:
    a, b = site.engines
    tokens = prompt(TOKENS, seed=3)
    miss = site.saved(a, tokens)
    geometry = site.pool.geometry
    for offset in range(geometry.data_offset, geometry.size, 64 << 10):
        line = read(site.pool, offset)
        write(site.pool, offset, bytes([line[0] ^ 1]) + line[1:])
    before = b.log().count("Recovered from KV load failure")
    again = b.generate(tokens)
    assert again["cached_tokens"] < TOKENS - 1
    assert again["tokens"] == miss["tokens"]
    assert b.log().count("Recovered from KV load failure") == before + 1


def test_without_the_server_everything_is_computed(site: Site) -> None:
    a, b = site.engines
    tokens = prompt(TOKENS, seed=4)
    miss = site.saved(a, tokens)
    site.server.stop()
    alone = b.generate(tokens)
    assert alone["cached_tokens"] == 0
    assert alone["tokens"] == miss["tokens"]
    assert b.generate(prompt(TOKENS, seed=5))["cached_tokens"] == 0
