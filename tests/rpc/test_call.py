# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A call transfers its bytes in both directions, and reports errors."""

import logging
import threading
from collections.abc import Iterator

import pytest
from other_machine import BULK, SLOTS

from beluga.errors import (
    BadRequestError,
    CallTimeoutError,
    HandlerError,
    NoMethodError,
    RpcError,
)
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, Server

ECHO, SUM, RAISE, FLOOD, WAIT, ODD = range(METHOD_USER, METHOD_USER + 6)


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def server(pool: Pool, gate: threading.Event) -> Iterator[Server]:
    def wait(_: bytes) -> bytes:
        gate.wait(30)
        return b"late"

    with Server(pool) as server:
        server.handle(ECHO, lambda request: request)
        server.handle(SUM, lambda request: str(sum(request)).encode())
        server.handle(RAISE, lambda request: request[len(request)].to_bytes(1, "big"))
        server.handle(FLOOD, lambda request: bytes(BULK + 1))
        server.handle(WAIT, wait)
        server.handle(ODD, lambda request: None)  # type: ignore[arg-type, return-value]
        yield server
        gate.set()


@pytest.fixture
def client(server: Server, pool: Pool) -> Iterator[Client]:
    with Client(pool) as client:
        yield client


def pattern(size: int, salt: int = 0) -> bytes:
    return bytes((i * 7 + salt) % 251 for i in range(size))


@pytest.mark.parametrize("size", [0, 1, 39, 40, 41, 63, 64, 65, 4096, BULK - 1, BULK])
def test_an_echo_of_any_size_is_returned_whole(client: Client, size: int) -> None:
    assert client.call(ECHO, pattern(size)) == pattern(size)


def test_a_long_request_may_have_a_short_reply(client: Client) -> None:
    assert client.call(SUM, pattern(BULK)) == str(sum(pattern(BULK))).encode()


def test_a_request_larger_than_the_bulk_area_is_refused_with_both_sizes(client: Client) -> None:
    with pytest.raises(BadRequestError, match=f"{BULK + 1}.*{BULK}"):
        client.call(ECHO, bytes(BULK + 1))
    assert client.call(ECHO, b"goes on") == b"goes on"


def test_slots_are_reused(client: Client) -> None:
    for number in range(SLOTS * 20 + 3):
        request = pattern(number % 90, number)
        assert client.call(ECHO, request) == request
    assert client.stat().call_count == SLOTS * 20 + 3
    assert client.stat().reattach_count == 0


def test_a_handler_that_raises_reaches_the_caller_and_the_log(
    client: Client, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(HandlerError):
        client.call(RAISE, b"abc")
    assert "IndexError" in caplog.text
    assert server.stat().error_count == 1
    assert client.call(ECHO, b"next") == b"next"


@pytest.mark.parametrize("method", [FLOOD, ODD])
def test_an_invalid_result_is_the_handlers_error(client: Client, method: int) -> None:
    with pytest.raises(HandlerError):
        client.call(method)
    assert client.call(ECHO, b"next") == b"next"


@pytest.mark.parametrize("method", [ODD + 1, 254, 256, 65535])
def test_a_method_without_a_handler_is_refused(client: Client, method: int) -> None:
    with pytest.raises(NoMethodError):
        client.call(method, b"?")
    assert client.call(ECHO, b"next") == b"next"


@pytest.mark.parametrize("size", [0, BULK])
def test_a_call_that_is_not_served_in_time_raises_and_the_next_one_works(
    client: Client, gate: threading.Event, size: int
) -> None:
    before = client.stat()
    with pytest.raises(CallTimeoutError):
        client.call(WAIT, pattern(size), timeout_s=0.05)
    gate.set()
    assert client.call(ECHO, pattern(size, 1)) == pattern(size, 1)
    after = client.stat()
    assert after.reattach_count == before.reattach_count + 1
    assert after.nonce != before.nonce


def test_a_timeout_applies_to_its_client_only(
    pool: Pool, client: Client, gate: threading.Event
) -> None:
    answers: list[bytes] = []
    with Client(pool) as other:
        thread = threading.Thread(target=lambda: answers.append(other.call(WAIT)))
        thread.start()
        with pytest.raises(CallTimeoutError):
            client.call(WAIT, timeout_s=0.05)
        gate.set()
        thread.join()
    assert answers == [b"late"]


def test_ping_measures_a_round_trip(client: Client) -> None:
    assert 0 < client.ping() < 5


def test_a_closed_client_raises_a_clear_error(client: Client) -> None:
    client.close()
    with pytest.raises(RpcError, match="closed"):
        client.call(ECHO)
    client.close()
