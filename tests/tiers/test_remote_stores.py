# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The remote tier over each store: one process loads blocks saved by another one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from redis_server import RedisServer, need_redis_server
from remote_blocks import blocks, same

from beluga.tiers.remote import RemoteSettings, RemoteTier, open_remote
from beluga.tiers.remote.store import RefusedError

SETTINGS = RemoteSettings(operation_s=20, load_s=40, save_s=40)


@pytest.fixture(
    params=["memory", "file", pytest.param("redis", marks=pytest.mark.slow)],
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        need_redis_server()
        server = RedisServer()
        yield server.url
        server.kill()
        return
    pytest.importorskip("obstore", reason="obstore is not installed")
    yield "memory:///" if request.param == "memory" else f"file://{tmp_path}/blocks of all"


@pytest.fixture
def tier(url: str) -> Iterator[RemoteTier]:
    made = open_remote(url, settings=SETTINGS)
    yield made
    made.close()


def test_saved_blocks_are_loaded_and_others_are_misses(tier: RemoteTier) -> None:
    records, payload = blocks([0, 1, 63, 64, 65, 4096, 100_000, 3 << 20])
    others, _ = blocks([5] * 3, seed=1)
    assert not tier.contains(records["key"]).any()
    assert tier.save(records, payload).all()
    keys = np.concatenate([others["key"], records["key"]])
    assert tier.contains(keys).tolist() == [False] * 3 + [True] * 8
    found = tier.load(keys)
    assert found[:3] == [None] * 3
    assert all(same(found[3:], records, payload))


def test_a_block_is_removed_once(tier: RemoteTier) -> None:
    records, payload = blocks([1000] * 5)
    assert tier.save(records, payload).all()
    assert tier.remove(records["key"][:2]) == 2
    assert tier.remove(records["key"]) == 3
    assert tier.remove(records["key"]) == 0
    assert same(tier.load(records["key"]), records, payload) == [False] * 5


def test_an_empty_batch_sends_no_request(tier: RemoteTier) -> None:
    records, payload = blocks([])
    assert tier.save(records, payload).shape == (0,)
    assert tier.load(records["key"]) == []
    assert tier.contains(records["key"]).shape == (0,)
    assert tier.remove(records["key"]) == 0


def test_a_foreign_object_under_the_key_is_replaced(tier: RemoteTier) -> None:
    """Also through the client: an object that is empty, short, foreign or that of another block."""
    records, payload = blocks([5000] * 6)
    assert tier.save(records, payload).all()
    store = tier._store
    names = [f"beluga-1/{key.tobytes().hex()[:2]}/{key.tobytes().hex()}" for key in records["key"]]
    right = bytes(store.get(names[0]) or b"")
    wrong = [b"", b"short", right[:-1], right + b"x", right[:100] + b"\0\1" + right[102:]]
    for name, contents in zip(names[1:], wrong, strict=True):
        store.put(name, memoryview(contents))
    store.put(names[1], memoryview(right))
    expected = [True] + [False] * 5
    assert same(tier.load(records["key"]), records, payload) == expected
    assert tier.save(records, payload).all()
    assert all(same(tier.load(records["key"]), records, payload))


SAVER = """
import sys
from remote_blocks import blocks
from beluga.tiers.remote import open_remote
tier = open_remote(sys.argv[1])
print(tier.save(*blocks([100_000] * 20, seed=7)).all(), flush=True)
sys.stdin.read()
"""


def test_a_block_outlives_the_process_that_saved_it(url: str) -> None:
    """The worked example: two processes, each with a pool of its own, over one store."""
    if url.startswith("memory:"):
        pytest.skip("a memory is of one process")
    records, payload = blocks([100_000] * 20, seed=7)
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, url],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert saver.stdout
    assert saver.stdout.readline() == "True\n"
    saver.kill()
    saver.communicate()
    loader = open_remote(url, settings=SETTINGS)
    assert all(same(loader.load(records["key"]), records, payload))
    loader.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_object_that_is_too_large_is_not_read(kind: str, tmp_path: Path) -> None:
    """Any client of the store may have written it."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    url = "memory:///" if kind == "memory" else f"file://{tmp_path}/blocks"
    settings = RemoteSettings(block_bytes=4096)
    tier = open_remote(url, settings=settings)
    try:
        most = settings.object_bytes
        tier._store.put("largest", memoryview(bytes(most)))
        tier._store.put("larger", memoryview(bytes(most + 1)))
        found = tier._store.get("largest")
        assert found is not None
        assert len(found) == most
        with pytest.raises(RefusedError, match=f"an object of {most + 1} bytes is too large"):
            tier._store.get("larger")
    finally:
        tier.close()
