# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What an operator can observe and change while a server runs: sessions, quotas, draining."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from support.blocks import eventually, held, keys, put, states

from beluga import KVCache
from beluga._ffi import lib
from beluga.errors import BadReplyError, BadRequestError, DrainingError, PinLimitError, QuotaError
from beluga.index import IndexClient, IndexServer, SessionView, fetch_sessions
from beluga.pool import Pool
from beluga.rpc import Client, Quota

LENGTH = 4096

Serve = Callable[[Quota], tuple[IndexServer, IndexClient, IndexClient]]


def view(server: IndexServer, client: Client) -> SessionView:
    nonce = f"{client.stat().nonce:016x}"
    return next(session for session in server.sessions() if session.nonce == nonce)


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
        assert {session.nonce for session in listed.sessions} == {
            session.nonce for session in server.sessions()
        }
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
    assert [session.lane for session in listed.sessions] == list(range(60))


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
            with suppress(QuotaError):
                client.ping()
                return False
            return True

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


@pytest.fixture
def serve(pool: Pool) -> Iterator[Serve]:
    """A server with a quota, and two sessions."""
    with ExitStack() as stack:

        def serve(quota: Quota) -> tuple[IndexServer, IndexClient, IndexClient]:
            server = stack.enter_context(IndexServer(pool, quota=quota))
            client, other = (IndexClient(stack.enter_context(Client(pool))) for _ in range(2))
            return server, client, other

        yield serve


def test_grants_beyond_the_quota_are_refused_until_some_end(serve: Serve) -> None:
    server, client, other = serve(Quota(grants=3))
    grants = client.reserve(keys(range(5)), length=LENGTH)
    assert states(grants) == ["GRANTED"] * 3 + ["REFUSED"] * 2
    assert {grant.status for grant in grants[3:]} == {-lib.BL_ERROR_QUOTA}
    assert server.stat().quota_grant_count == 2
    assert states(other.reserve(keys([9]), length=LENGTH)) == ["GRANTED"]
    assert client.commit(grants[:1]) == [0]
    assert client.abort(grants[1:2]) == 1
    assert states(client.reserve(keys(range(3, 6)), length=LENGTH)) == ["GRANTED"] * 2 + ["REFUSED"]


def test_pins_beyond_the_quota_are_refused_until_some_are_released(serve: Serve) -> None:
    server, client, other = serve(Quota(pins=2))
    put(client, range(4), length=LENGTH)
    hits = client.lookup(keys(range(4)), pin=True).hits
    assert len(hits) == 2
    assert len(client.lookup(keys(range(2)), pin=True).hits) == 2  # the same blocks again
    with pytest.raises(PinLimitError):
        client.lookup(keys([3]), pin=True)
    assert server.stat().quota_pin_count == 2
    assert len(other.lookup(keys([3]), pin=True).hits) == 1
    assert client.release([*hits, *hits]) == 4
    assert len(client.lookup(keys([3]), pin=True).hits) == 1


def test_bytes_count_grants_and_pinned_blocks(serve: Serve) -> None:
    server, client, _ = serve(Quota(bytes=3 * LENGTH))
    put(client, range(2), length=LENGTH)
    pinned = client.lookup(keys(range(2)), pin=True).hits
    assert states(client.reserve(keys([2, 3]), length=LENGTH)) == ["GRANTED", "REFUSED"]
    assert states(client.reserve(keys([4]), length=1)) == ["REFUSED"]
    assert (server.stat().quota_grant_count, server.stat().quota_pin_count) == (2, 0)
    assert client.release(pinned[:1]) == 1
    assert len(client.lookup(keys([0, 1]), pin=True).hits) == 2
    put_back = client.lookup(keys([0, 1]), pin=True).hits
    assert client.release([*pinned, *put_back, pinned[1]]) == 5
    assert states(client.reserve(keys([3, 5]), length=LENGTH)) == ["GRANTED"] * 2


def test_a_pin_of_too_many_bytes_is_a_quota_error(serve: Serve) -> None:
    server, client, other = serve(Quota(bytes=2 * LENGTH))
    put(client, range(1), length=2 * LENGTH)
    (grant,) = other.reserve(keys([7]), length=LENGTH)
    with pytest.raises(QuotaError, match="quota"):
        other.lookup(keys([0]), pin=True)
    assert server.stat().quota_pin_count == 1
    assert other.abort([grant]) == 1
    assert len(other.lookup(keys([0]), pin=True).hits) == 1


def test_a_reused_lane_has_a_full_quota(serve: Serve, pool: Pool) -> None:
    serve(Quota(grants=2, pins=1, bytes=3 * LENGTH))
    for turn in range(3):
        with Client(pool) as client:
            index = IndexClient(client)
            (grant,) = index.reserve(keys([100 + turn]), length=LENGTH)
            assert index.commit([grant]) == [0]
            assert len(index.lookup(keys([100 + turn]), pin=True).hits) == 1
            grants = index.reserve(keys([200 + turn, 300 + turn]), length=LENGTH)
            assert states(grants) == ["GRANTED"] * 2


def test_calls_beyond_the_rate_are_refused_and_do_not_affect_others(serve: Serve) -> None:
    server, client, other = serve(Quota(calls_per_s=5))
    start, answered, refused = time.monotonic(), 0, 0
    for _ in range(60):
        try:
            client.lookup(keys([0]))
            answered += 1
        except QuotaError:
            refused += 1
    elapsed = time.monotonic() - start
    assert 5 <= answered <= 5 + 5 * elapsed + 1
    assert refused == server.stat().quota_call_count
    assert server.stat().error_count == refused
    assert held(other, [0]) == set()


def test_calls_that_release_space_are_not_limited(serve: Serve) -> None:
    _, client, _ = serve(Quota(calls_per_s=2))
    (grant,) = client.reserve(keys([0]), length=LENGTH)
    for _ in range(20):
        try:
            client.lookup(keys([1]))
        except QuotaError:
            break
    else:
        pytest.skip("this machine is too slow to use a quota of two calls a second up")
    assert client.commit([grant]) == [0]


@pytest.mark.parametrize("wrong", [{"grants": -1}, {"pins": 1 << 32}, {"bytes": 1 << 64}])
def test_an_impossible_quota_is_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be from 0 to"):
        Quota(**wrong)
