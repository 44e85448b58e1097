# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server survives any bytes that a client sends to the block index, and nothing leaks (D13)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.blocks import held, keys, put
from support.emulation import fewer

from beluga._ffi import ffi, lib
from beluga.errors import BadRequestError, BelugaError
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

METHODS = {
    name: getattr(lib, f"BL_METHOD_{name}")
    for name in (
        *("LOOKUP", "RESERVE", "COMMIT", "ABORT", "RELEASE", "REMOVE"),
        *("STAT", "PING", "RETIRE"),
    )
}
ITEM_SIZE = {"LOOKUP": 16, "RESERVE": 16, "REMOVE": 16, "COMMIT": 32, "ABORT": 32, "RELEASE": 32}


class Target:
    """A server, a client that may send anything, and the state that must not change."""

    def __init__(self, directory: Path) -> None:
        self.pool = Pool.create([directory / "a"], device_size=32 << 20, sparse=True, max_blocks=64)
        self.server = IndexServer(self.pool)
        self.server.start()
        self.rude, self.polite = Client(self.pool), Client(self.pool)
        self.index = IndexClient(self.polite)
        put(self.index, range(4), length=4096)
        self.hits = self.index.lookup(keys(range(4)), pin=True).hits

    def send(self, method: str, request: bytes) -> None:
        with suppress(BelugaError):
            self.rude.call(METHODS[method], request)

    def check(self) -> None:
        """Check that the other session's pinned blocks are present, and that the effects of the
        hostile one can be undone.
        """
        assert held(self.index, range(4)) == {0, 1, 2, 3}
        assert self.index.stat().pinned_count >= 4
        assert self.server.failure is None


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as directory:
        target = Target(Path(directory))
        yield target
        target.rude.close()
        end = target.index.stat()
        assert (end.grant_count, end.pinned_count) == (0, 4)
        target.pool.close()


def head(count: int, *, length: int = 4096, chunk_size: int = 0, flags: int = 0) -> bytes:
    fields = {"count": count, "length": length, "chunk_size": chunk_size, "flags": flags}
    return bytes(ffi.buffer(ffi.new("bl_block_request *", fields)))


@pytest.mark.parametrize("method", ITEM_SIZE)
@pytest.mark.parametrize("count", [0, 2, 3, 0xFFFFFFFF, 1 << 28, 1 << 27])
def test_a_count_that_does_not_match_the_bytes_is_refused(
    target: Target, method: str, count: int
) -> None:
    errors = target.server.stat().error_count
    for request in (head(count) + bytes(ITEM_SIZE[method]), head(count)[:-1], b""):
        with pytest.raises(BadRequestError):
            target.rude.call(METHODS[method], request)
    assert target.server.stat().error_count == errors + 3
    target.check()


@pytest.mark.parametrize("block", [0, 63, 64, 1 << 31, 0xFFFFFFFF])
@pytest.mark.parametrize("method", ["COMMIT", "ABORT", "RELEASE"])
def test_a_block_number_of_another_session_has_no_effect(
    target: Target, method: str, block: int
) -> None:
    before = target.index.stat()
    commit = ffi.new("bl_commit *", {"block": block, "key": target.hits[0].key})
    target.send(method, head(1) + bytes(ffi.buffer(commit)))
    after = target.index.stat()
    for name in ("block_count", "grant_count", "pinned_count", "commit_count", "abort_count"):
        assert getattr(after, name) == getattr(before, name), name


@settings(max_examples=fewer(300), deadline=None)
@given(method=st.sampled_from(sorted(METHODS)), request=st.binary(max_size=400))
def test_random_bytes_do_no_harm(target: Target, method: str, request: bytes) -> None:
    target.send(method, request)
    target.check()


numbers = st.sampled_from([0, 1, 2, 63, 64, 4096, 65536, 1 << 20, 1 << 31, (1 << 32) - 1])


@settings(max_examples=fewer(300), deadline=None)
@given(
    method=st.sampled_from(sorted(ITEM_SIZE)),
    items=st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=20),
    length=numbers,
    chunk_size=numbers,
    flags=numbers,
)
def test_random_valid_requests_do_no_harm(
    target: Target, *, method: str, items: list[bytes], length: int, chunk_size: int, flags: int
) -> None:
    body = b"".join(item[: ITEM_SIZE[method]] for item in items)
    request = head(len(items), length=length, chunk_size=chunk_size, flags=flags) + body
    target.send(method, request)
    target.check()


@settings(max_examples=fewer(100), deadline=None)
@given(
    method=st.sampled_from(["COMMIT", "ABORT", "RELEASE"]),
    blocks=st.lists(st.integers(0, 70), min_size=1, max_size=20),
    generation=st.integers(0, 1 << 41),
)
def test_guessed_blocks_do_no_harm(
    target: Target, method: str, blocks: list[int], generation: int
) -> None:
    commits = [
        {"block": block, "generation": generation, "key": target.hits[block % 4].key}
        for block in blocks
    ]
    body = bytes(ffi.buffer(ffi.new("bl_commit[]", commits)))
    target.send(method, head(len(blocks)) + body)
    target.check()
