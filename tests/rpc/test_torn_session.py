# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server dies between the stores of a session's line: its successor assigns the lane and the
space only to clients that may have them.
"""

from __future__ import annotations

import pytest
from other_machine import session_offset
from support.blocks import eventually, keys
from support.forge import line_hash, read, write

from beluga._ffi import ffi, lib
from beluga.index import IndexClient, IndexServer, check_pool
from beluga.pool import Pool
from beluga.rpc import Client

pytestmark = pytest.mark.parametrize("coherence", ["software"], indirect=True)


def changed(line: bytes, **fields: int) -> bytes:
    """Return the whole line that the server was about to write."""
    struct = ffi.new("bl_session_line *")
    ffi.memmove(struct, line, len(line))
    for name, value in fields.items():
        setattr(struct, name, value)
    raw = bytes(ffi.buffer(struct))
    return raw[:60] + line_hash(raw[:60] + bytes(4), 0).to_bytes(4, "little")


def mixed(before: bytes, after: bytes, stores: set[int]) -> bytes:
    """Mix two lines: only these 8-byte stores of the new line are in memory."""
    return b"".join(
        (after if store in stores else before)[8 * store : 8 * store + 8] for store in range(8)
    )


@pytest.mark.parametrize("stores", [{3}, {7}], ids=["state", "check"])
@pytest.mark.parametrize("state", ["FREE", "SUSPECT"])
def test_a_session_whose_line_is_torn_keeps_its_grants(
    pool: Pool, state: str, stores: set[int]
) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        first.stop()
    offset = session_offset(pool, 0, epoch=1)
    line = read(pool, offset)
    after = changed(line, state=getattr(lib, f"BL_SESSION_{state}"))
    write(pool, offset, mixed(line, after, stores))
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
        assert second.index_stat().held_bytes >= 1 << 20
        with Client(pool) as other:
            assert other.stat().lane == 1
        client.close()
        assert eventually(lambda: second.stat().inherited_count == 0)
        assert second.index_stat().held_bytes == 0


@pytest.mark.parametrize("byte", [8, 24, 28, 32, 60])
def test_a_damaged_line_keeps_the_lane_until_its_process_is_gone(pool: Pool, byte: int) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        first.stop()
    offset = session_offset(pool, 0, epoch=1)
    line = bytearray(read(pool, offset))
    line[byte] ^= 1
    write(pool, offset, bytes(line))
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
        client.close()
        assert eventually(lambda: second.stat().inherited_count == 0)


@pytest.mark.parametrize("epoch", [0, 2, 1 << 40], ids=["none", "the successor's", "a late one"])
def test_a_line_with_a_damaged_epoch_is_of_an_earlier_session(pool: Pool, epoch: int) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        first.stop()
    offset = session_offset(pool, 0, epoch=1)
    line = bytearray(read(pool, offset))
    line[32:40] = epoch.to_bytes(8, "little")
    write(pool, offset, bytes(line))
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
        assert not check_pool(pool).findings  # the line that it has written
        client.close()
        assert eventually(lambda: second.stat().inherited_count == 0)
        assert second.index_stat().held_bytes == 0


def test_a_client_without_a_reply_has_no_lane(pool: Pool) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        given = read(pool, session_offset(pool, 0, epoch=1))
        client.close()
        free = read(pool, session_offset(pool, 0, epoch=1))
        assert free[:8] == bytes(8)  # not the name of a session
        first.stop()
    write(pool, session_offset(pool, 0, epoch=1), mixed(free, given, {1, 2, 3, 4, 7}))
    with IndexServer(pool) as second, Client(pool) as client:
        assert second.stat().inherited_count == 0
        assert client.stat().lane == 0
