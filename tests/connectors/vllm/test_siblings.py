# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Our connector together with one whose loads fail, in real engines: whatever fails, in any order,
the pool has only correct KV, and each request ends as if nothing had failed.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beluga_bench.vllm.process import Engine
from beluga_bench.vllm.prompts import prompt
from real_engines import BLOCK, TOKENS, Site, child_of, forget, running, several

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCKS = TOKENS // BLOCK
TOLERANCE = 1e-3  # float32, computed in chunks of several shapes


class SavedBlocks:
    """The folders of blocks, and the file of faults; see ``siblings.py``."""

    def __init__(self, folder: Path) -> None:
        self.right, self.saved, self.faults = folder / "right", folder / "saved", folder / "faults"
        self.right.mkdir()
        self.saved.mkdir()
        self.faults.write_text("")

    def environment(self) -> dict[str, str]:
        return {
            "BELUGA_TEST_RIGHT": str(self.right),
            "BELUGA_TEST_SAVED": str(self.saved),
            "BELUGA_TEST_FAULTS": str(self.faults),
        }

    def check(self) -> int:
        """Check that everything that was saved is right. Returns how many blocks that is."""
        saved = sorted(self.saved.iterdir())
        for file in saved:
            wanted = np.frombuffer((self.right / file.name).read_bytes(), dtype=np.float32)
            content = np.frombuffer(file.read_bytes(), dtype=np.float32)
            assert np.allclose(content, wanted, atol=TOLERANCE, rtol=TOLERANCE), file.name
        return len(saved)


class Pair:
    """An engine with both connectors, in one order."""

    def __init__(self, site: Site, saved_blocks: SavedBlocks, *, first: str, load: str) -> None:
        self.saved_blocks, self.count = saved_blocks, 0
        children = [
            child_of("FaultyConnector"),
            site.connector("KeepingConnector", load=load),
        ]
        self.engine = site.engine(
            f"{first}-first-{load}",
            connector=None,
            environment=saved_blocks.environment(),
            kv_transfer_config=several(*(children if first == "other" else children[::-1])),
        )

    def run(
        self, prompts: Sequence[list[int]], faults: Sequence[dict[str, Any] | None], **named: Any
    ) -> list[dict[str, Any]]:
        """Run prompts at once, each with the other connector's fault."""
        with self.saved_blocks.faults.open("a") as file:
            file.writelines(json.dumps(fault) + "\n" for fault in faults)
        replies: list[dict[str, Any]] = self.engine.call("generate", prompts=prompts, **named)[
            "outputs"
        ]
        return replies

    def forget(self) -> None:
        forget(self.engine)


@dataclasses.dataclass
class World:
    """The engines: one that computes everything, and pairs."""

    plain: Engine
    saved_blocks: SavedBlocks
    site: Site
    answers: dict[tuple[int, ...], list[int]] = dataclasses.field(default_factory=dict)

    def right(self, tokens: list[int], count: int = 8) -> list[int]:
        """Compute a prompt alone, and keep its blocks. Returns the answer."""
        key = tuple(tokens)
        if key not in self.answers:
            self.plain.call("reset")
            self.answers[key] = self.plain.generate(tokens, max_tokens=count)["tokens"]
        return self.answers[key]


@pytest.fixture(scope="module")
def world(site: Site) -> Iterator[World]:
    saved_blocks = SavedBlocks(site.folder)
    plain = site.engine(
        "plain",
        connector=None,
        environment=saved_blocks.environment(),
        kv_transfer_config=child_of("RightConnector"),
    )
    with running([plain]):
        yield World(plain, saved_blocks, site)


@pytest.fixture(scope="module", params=["other-sync", "ours-sync", "other-async", "ours-async"])
def pair(request: pytest.FixtureRequest, world: World) -> Iterator[Pair]:
    first, _, load = request.param.partition("-")
    pair = Pair(world.site, world.saved_blocks, first=first, load=load)
    with running([pair.engine]):
        yield pair


def faults(seed: int) -> dict[str, Any]:
    """Return a fault of any kind."""
    chance = random.Random(seed)
    blocks = chance.randint(2, BLOCKS - 1)
    load = chance.choice(["sync", "async"])
    bad = chance.sample(range(blocks), chance.randint(1, blocks))
    report = chance.choice(["early", "end", "request"]) if load == "async" else "end"
    return {"blocks": blocks, "bad": bad, "load": load, "report": report}


def test_a_failed_load_of_another_connector_leaves_no_wrong_block_in_the_pool(
    world: World, pair: Pair
) -> None:
    seed = pair.engine.pid * 1000
    before = world.saved_blocks.check()
    for turn in range(6):
        tokens = prompt(TOKENS, seed=seed + turn)
        wanted = world.right(tokens)
        pair.forget()
        (answer,) = pair.run([tokens], [faults(turn)])
        assert answer["tokens"] == wanted, faults(turn)
        pair.forget()
        (answer,) = pair.run([tokens], [None])  # from the pool
        assert answer["tokens"] == wanted, faults(turn)
        assert answer["cached_tokens"] > 0
    assert world.saved_blocks.check() >= before + 6


def test_requests_that_share_a_prefix_with_a_failed_load_save_no_wrong_block(
    world: World, pair: Pair
) -> None:
    seed = pair.engine.pid * 1000 + 100
    for turn in range(3):
        shared = prompt(6 * BLOCK, seed=seed + turn)
        prompts = [shared + prompt(3 * BLOCK + 1, seed=seed + 10 + 5 * turn + i) for i in range(4)]
        for tokens in prompts:
            world.right(tokens)
        pair.forget()
        sync = {"blocks": 6, "bad": [turn, 5], "load": "sync"}
        pair.run(prompts, [sync, None, faults(turn) | {"blocks": 6, "bad": [1]}, None])
        pair.run(prompts, [None] * 4)
        pair.forget()
        world.saved_blocks.check()
        pair.run(prompts, [None] * 4)
        pair.forget()
    world.saved_blocks.check()


def test_a_remote_prefill_after_a_hit_is_saved(world: World, pair: Pair) -> None:
    """Its request ends in the step that loads."""
    seed = pair.engine.pid * 1000 + 200
    tokens = prompt(TOKENS, seed=seed)
    world.right(tokens)
    pair.forget()
    pair.run([tokens[: 4 * BLOCK + 1]], [None], max_tokens=1)
    pair.forget()
    (answer,) = pair.run([tokens], [None], max_tokens=1)
    assert answer["cached_tokens"] == 4 * BLOCK
    pair.forget()
    (answer,) = pair.run([tokens], [None], max_tokens=1)
    assert answer["cached_tokens"] == TOKENS - 1
    world.saved_blocks.check()


def test_a_damaged_block_is_computed_again(world: World, pair: Pair) -> None:
    """The policy that the user has left at its default would end the request with an error."""
    tokens = prompt(TOKENS, seed=pair.engine.pid * 1000 + 300)
    wanted = world.right(tokens)
    pair.forget()
    pair.run([tokens], [None])
    pair.forget()
    world.site.damage()
    (answer,) = pair.run([tokens], [None])
    assert answer["tokens"] == wanted
    world.saved_blocks.check()
