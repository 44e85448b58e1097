# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A cache rejects wrong arguments before it calls the server, whatever the pool contains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.emulation import PATIENCE

from beluga import IndexServer, KVCache, Pool
from beluga.errors import LayoutError
from beluga.kvcache import Run
from beluga.transfer import BlockLayout, CpuEngine, Slots, View, arrangements
from tests.kvcache.conftest import digests

SHAPE = (2, 3, 4, 2, 8)  # K and V, blocks, tokens, heads, bytes


def layout_of(array: Any) -> BlockLayout:
    return arrangements.vllm([View.of(array)])


@pytest.fixture
def target() -> BlockLayout:
    return layout_of(np.zeros(SHAPE, np.uint8))


@pytest.mark.parametrize(
    ("count", "tokens", "slots", "match"),
    [
        (1, [4], [0], "tokens 4 to 4"),
        (1, [-1], [0], "tokens -1"),
        (1, [0], [12], "slots 12 to 12"),
        (1, [0], 0, "slots of shape"),
        (1, [0, 1], [0], "slots of shape"),
        (1, np.array([True, False, True, False]), [0, 1, 2, 3], "whole numbers"),
        (1, [0.5], [0], "whole numbers"),
        (1, [0], np.array([True]), "whole numbers"),
        (2, [0], [0], "give each its block"),
        (2, [[0, 0], [1]], [0, 1], "whole numbers"),
        (2, [[-1, 0], [0, 0]], [0, 1], "blocks -1 to 0; their numbers"),
        (2, [[1, 0], [2, 0]], [0, 1], "blocks 1 to 2; their numbers"),
    ],
)
def test_wrong_tokens_are_reported_even_in_an_empty_pool(
    cache: KVCache, target: BlockLayout, count: int, tokens: Any, slots: Any, *, match: str
) -> None:
    with pytest.raises(LayoutError, match=match):
        cache.get_tokens(digests(count), tokens, Slots(target, slots))


def test_an_empty_list_of_tokens_fetches_nothing(cache: KVCache, target: BlockLayout) -> None:
    assert cache.put(digests(2), Run.of(layout_of(np.ones(SHAPE, np.uint8)), [0, 1])).stored == 2
    for tokens in ([], np.empty((0, 2))):
        assert cache.get_tokens(digests(2), tokens, Slots(target, [])).hits == 2


def test_read_only_memory_is_rejected_as_a_target_of_a_cache(cache: KVCache) -> None:
    content = bytes(np.prod(SHAPE))
    frozen = layout_of(np.frombuffer(content, np.uint8).reshape(SHAPE))
    cache.put(digests(1), Run.of(layout_of(np.ones(SHAPE, np.uint8)), [0]))
    with pytest.raises(LayoutError, match="read-only"):
        cache.get(digests(1), Run.of(frozen, [0]))
    with pytest.raises(LayoutError, match="read-only"):
        cache.get_tokens(digests(1), [0], Slots(frozen, [0]))
    assert content == bytes(len(content))
    assert cache.put(digests(1, start=1), Run.of(frozen, [0])).stored == 1


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 2, 2)])
def test_keys_must_be_pairs(cache: KVCache, shape: tuple[int, ...]) -> None:
    keys = np.zeros(shape, np.uint64)
    for call in (cache.lookup, cache.remove, cache.pin):
        with pytest.raises(ValueError, match="shape"):
            call(keys)
    with pytest.raises(ValueError, match="shape"):
        cache.put(keys, [b"x"] * len(keys))


def test_an_array_of_objects_is_not_a_block(cache: KVCache) -> None:
    with pytest.raises(LayoutError, match="objects"):
        cache.put(digests(1), np.array([[None, 1]]))


HARMLESS = (
    *(f"{cache}: {call} a field called O" for cache in range(3) for call in ("put", "get")),
    *(f"{cache}: put read-only" for cache in range(3)),
    "a cache with {'threads': 1000000}",
    "a million threads",
    "copies set to [4294967295]",
    "copies set to [0]",
    "commit of a stranger's",  # each is refused by its status
    "abort of a stranger's",
    "release of a stranger's",
    "more pins than there are",
    "fewer pins than none",
    "flush of nothing",
)
KINDS = {
    *("BadTypeError", "BadValueError", "LayoutError", "RpcError"),
    *("ValueError", "TypeError", "OverflowError"),
}


def test_invalid_arguments_to_c_do_not_crash_the_interpreter(shm: Path) -> None:
    """``misuse_process.py`` has the table; every case is rejected unless it is harmless."""
    script = Path(__file__).with_name("misuse_process.py")
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", script, shm],
        capture_output=True,
        text=True,
        timeout=200 * PATIENCE,
        check=False,
    )
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, f"{lines[-1:]} ended it: {ended.stderr[-2000:]}"
    assert lines.pop() == "all ended"
    results = dict(line.split(" ... ", 1) for line in lines)
    done = {name for name, what in results.items() if what == "done"}
    assert done == set(HARMLESS)
    kinds = {what.partition(":")[0] for what in results.values()} - {"done"}
    assert kinds == KINDS


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"chunk_size": 100}, {"chunk_size": -64}])
def test_invalid_settings_of_a_cache_are_rejected(
    pool: Pool, server: IndexServer, wrong: dict[str, Any]
) -> None:
    with pytest.raises(LayoutError):
        KVCache(pool, namespace="wrong", **wrong)


def test_tokens_are_fetched_by_the_configured_number_of_threads(
    pool: Pool, server: IndexServer, target: BlockLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    read = CpuEngine.scatter_read

    def watched(engine: CpuEngine, plan: Any) -> Any:
        seen.append(engine.threads)
        return read(engine, plan)

    monkeypatch.setattr(CpuEngine, "scatter_read", watched)
    for threads in (1, 3):
        with KVCache(pool, namespace="threads", threads=threads) as cache:
            cache.put(digests(1), Run.of(layout_of(np.ones(SHAPE, np.uint8)), [0]))
            assert cache.get_tokens(digests(1), [0], Slots(target, [0])).hits == 1
    assert seen == [1, 3]
