# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What an operator can observe and change while a server runs: sessions, quotas, draining."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from support.blocks import eventually, held, keys, put, states

from beluga import KVCache
from beluga._ffi import lib
from beluga.errors import BadReplyError, BadRequestError, DrainingError, QuotaError
from beluga.index import IndexClient, IndexServer, SessionView, fetch_sessions
from beluga.pool import Pool
from beluga.rpc import Client, Quota

LENGTH = 4096


def view(server: IndexServer, client: Client) -> SessionView:
    nonce = f"{client.stat().nonce:016x}"
    return next(one for one in server.sessions() if one.nonce == nonce)


def test_a_session_is_listed_with_its_grants_and_pins(pool: Pool, server: IndexServer) -> None:
    with Client(pool) as client, Client(pool) as other:
        index = IndexClient(client)
        put(index, range(3), length=LENGTH)
        index.lookup(keys(range(2)), pin=True)
        index.reserve(keys([7]), length=2 * LENGTH)
        seen = view(server, client)
        assert (seen.pid, seen.host, seen.state, seen.trust) == (os.getpid(), 0, "live", "watched")
        assert (seen.pin_count, seen.grant_count) == (2, 1)
        assert (seen.bytes, seen.held_bytes) == (4 * LENGTH, 0)
        assert seen.call_count == 4
        assert eventually(lambda: 0 <= view(server, client).heartbeat_s < 1.0)
        listed = fetch_sessions(other)
        assert {one.nonce for one in listed.sessions} == {one.nonce for one in server.sessions()}
        assert not listed.draining
    assert eventually(lambda: server.sessions() == [])


def test_sessions_of_many_lanes_need_several_replies(paths: list[object]) -> None:
    small = {"lane_count": 60, "bulk_size": 4096, "device_size": 32 << 20, "sparse": True}
    with (
        Pool.create(paths, max_blocks=64, **small) as pool,  # type: ignore[arg-type]
        IndexServer(pool),
    ):
        clients = [Client(pool) for _ in range(60)]
        listed = fetch_sessions(clients[0])
        for client in clients:
            client.close()
    assert [one.lane for one in listed.sessions] == list(range(60))


@pytest.mark.parametrize("request_", [b"", b"\0\0\0", b"\0" * 8])
def test_a_malformed_request_is_rejected(pool: Pool, server: IndexServer, request_: bytes) -> None:
    with Client(pool) as client, pytest.raises(BadRequestError):
        client.call(lib.BL_METHOD_SESSIONS, request_)


@pytest.mark.parametrize("reply", [b"", b"\1" + bytes(39), bytes(40) + b"x"])
def test_a_malformed_reply_is_rejected(
    pool: Pool, server: IndexServer, monkeypatch: pytest.MonkeyPatch, reply: bytes
) -> None:
    with Client(pool) as client:
        monkeypatch.setattr(client, "call", lambda *_: reply)
        with pytest.raises(BadReplyError):
            fetch_sessions(client)


def test_a_session_that_may_still_write_is_quarantined_and_listed(pool: Pool) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        first.stop()
    with IndexServer(pool) as second:
        (suspect,) = second.sessions()
        assert (suspect.state, suspect.epoch) == ("suspect", 1)
        assert suspect.why(epoch=2).startswith("it is from epoch 1, has not attached again")
        assert suspect.freed_by() == "the end of the process on host 0"
        client.close()
        assert eventually(lambda: second.sessions() == [])


def test_limits_change_while_sessions_work(pool: Pool, server: IndexServer) -> None:
    with Client(pool) as client:
        index = IndexClient(client)
        grants = index.reserve(keys(range(4)), length=LENGTH)
        server.limit(Quota(grants=2))
        assert server.quota == Quota(grants=2)
        assert eventually(lambda: fetch_sessions(client).quota == Quota(grants=2))
        assert states(index.reserve(keys([9]), length=LENGTH)) == ["REFUSED"]
        assert index.commit(grants) == [0] * 4  # the session keeps its earlier pins
        assert states(index.reserve(keys([9, 10, 11]), length=LENGTH)) == [
            *["GRANTED"] * 2,
            "REFUSED",
        ]
        server.limit(Quota())
        assert eventually(lambda: fetch_sessions(client).quota == Quota())
        assert states(index.reserve(keys([11]), length=LENGTH)) == ["GRANTED"]


def test_a_call_limit_set_later_begins_with_a_full_bucket(pool: Pool, server: IndexServer) -> None:
    with Client(pool) as client:
        server.limit(Quota(calls_per_s=50))
        assert eventually(lambda: fetch_sessions(client).quota.calls_per_s == 50)

        def refused() -> bool:
            try:
                client.ping()
            except QuotaError:
                return True
            return False

        assert eventually(refused)
        assert client.stat().call_count >= 45  # some of the calls came before the limit was set
        server.limit(Quota())
        assert eventually(lambda: not refused())


def drained(server: IndexServer, draining: bool) -> bool:
    server.drain(draining)
    return eventually(lambda: server.stat().draining == draining)


def test_a_drained_pool_rejects_new_blocks_and_serves_other_calls(
    pool: Pool, server: IndexServer, attach: Callable[[], IndexClient]
) -> None:
    index = attach()
    put(index, range(3), length=LENGTH)
    grants = index.reserve(keys([5]), length=LENGTH)
    assert drained(server, True)
    refused = index.reserve(keys([1, 6]), length=LENGTH)
    assert states(refused) == ["HIT", "REFUSED"]
    assert refused[1].status == -lib.BL_ERROR_DRAINING
    assert held(index, range(9)) == {0, 1, 2}
    assert index.commit(grants) == [0]
    assert held(index, range(9)) == {0, 1, 2, 5}
    assert server.refusals()["draining"] == 1
    assert attach().stat().block_count == 4  # a new session may read
    with KVCache(pool, namespace="x") as cache:
        result = cache.put([b"0123456789abcdef"], [bytes(LENGTH)])
        with pytest.raises(DrainingError, match="beluga drain --undo"):
            result.raise_for_refused()
    assert drained(server, False)
    assert states(index.reserve(keys([6]), length=LENGTH)) == ["GRANTED"]


def test_draining_ends_with_its_server(pool: Pool) -> None:
    with IndexServer(pool) as first:
        assert drained(first, True)
    with IndexServer(pool) as second, Client(pool) as client:
        assert not second.stat().draining
        assert states(IndexClient(client).reserve(keys([1]), length=LENGTH)) == ["GRANTED"]
