# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Request lines may contain anything, whole and overwritten: the sender gets an error, and nothing
else happens.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.blocks import eventually, held, keys, put
from support.emulation import fewer
from support.forge import LINE, Lane, bulk_payload, read, request_line, write

from beluga._ffi import lib
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client


class Target:
    """A server, a correct session with a pinned block, and a lane for hostile requests."""

    def __init__(self, directory: Path) -> None:
        self.pool = Pool.create([directory / "a"], device_size=32 << 20, sparse=True, max_blocks=64)
        self.server = IndexServer(self.pool)
        self.server.start()
        self.rude, self.polite = Client(self.pool), Client(self.pool)
        self.index = IndexClient(self.polite)
        self.lane = Lane(self.rude)
        self.sequence = 0
        put(self.index, range(2), length=4096)
        assert len(self.index.lookup(keys(range(2)), pin=True).hits) == 2

    def send(self, method: int, payload: bytes, **fields: int) -> int:
        """Return the server's status for a whole line."""
        self.sequence += 1
        self.lane.send(self.sequence, method, payload, **fields)
        return self.receive()

    def receive(self) -> int:
        assert eventually(lambda: self.lane.answered(self.sequence))
        reply = read(self.pool, self.lane.reply(self.sequence))
        return int.from_bytes(reply[12:16], "little", signed=True)

    def check(self) -> None:
        assert held(self.index, range(2)) == {0, 1}
        assert self.index.stat().pinned_count == 2
        assert self.server.failure is None


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as directory:
        target = Target(Path(directory))
        yield target
        target.pool.close()


@pytest.mark.parametrize(
    ("method", "payload", "fields"),
    [
        (0, b"", {"size": 41}),
        (0, b"", {"size": 255}),
        (0, b"", {"flags": 1, "size": 0}),
        (0, (5000).to_bytes(4, "little"), {"flags": 1}),
        (0, (1 << 31).to_bytes(8, "little"), {"flags": 1}),
        (0, bulk_payload(b"not there"), {"flags": 1}),
        (63, b"", {}),
        (254, b"", {}),
        (256, b"", {}),
        (65535, b"", {}),
        (1, b"", {}),
        (6, b"x" * 40, {}),
    ],
)
def test_a_field_out_of_range_is_an_error_to_its_sender(
    target: Target, method: int, payload: bytes, fields: dict[str, int]
) -> None:
    before = target.server.stat().error_count
    assert target.send(method, payload, **fields) in (
        -lib.BL_ERROR_BAD_REQUEST,
        -lib.BL_ERROR_NO_METHOD,
    )
    assert target.server.stat().error_count == before + 1
    target.check()


@settings(max_examples=fewer(100), deadline=None)
@given(at=st.integers(0, LINE - 1), bit=st.integers(0, 7))
def test_a_torn_line_is_not_a_request(target: Target, at: int, bit: int) -> None:
    sequence, lane = target.sequence + 1, target.lane
    line = bytearray(request_line(0, b"", sequence, lane.key))
    line[at] ^= 1 << bit
    calls = target.server.stat().call_count
    write(target.pool, lane.request(sequence), bytes(line))
    target.polite.ping()
    target.polite.ping()  # the server has polled every lane since then
    assert not lane.answered(sequence)
    assert target.server.stat().call_count <= calls + 2
    assert target.send(0, b"") == 0  # the same line, whole


@settings(max_examples=fewer(150), deadline=None)
@given(
    method=st.integers(0, 300),
    payload=st.binary(max_size=40),
    flags=st.integers(0, 255),
    size=st.integers(0, 255),
    epoch=st.integers(0, (1 << 32) - 1),
)
def test_every_valid_line_gets_a_reply(
    target: Target, *, method: int, payload: bytes, flags: int, size: int, epoch: int
) -> None:
    target.send(method, payload, flags=flags, size=size, epoch=epoch)
    target.check()
