# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls that take several messages or several polls. The test is the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.blocks import keys

from beluga._ffi import ffi, lib
from beluga.errors import BadReplyError, HandlerError
from beluga.index import BlockState, Grant, IndexClient
from beluga.pool import Pool
from beluga.rpc import Client, Server

MOST = lib.BL_CALL_KEYS_MAX  # keys of a message
HEAD = ffi.sizeof("bl_block_request")
LOOKS = 300  # polls in the second that a removal waits for a disk, with sleeps of up to 4 ms


def reply(count: int, state: int = 0, after: bytes = b"") -> bytes:
    return bytes(ffi.buffer(ffi.new("bl_block_reply *", {"count": count, "state": state}))) + after


class Script:
    """A server that records the items of each call, and answers by functions of their count."""

    def __init__(self, pool: Pool) -> None:
        self.server = Server(pool)
        self.items: dict[int, list[bytes]] = {}
        self.answers: dict[int, Callable[[int], bytes]] = {}
        for method in (lib.BL_METHOD_RELEASE, lib.BL_METHOD_REMOVE, lib.BL_METHOD_REMOVING):
            self.items[method] = []
            self.server.handle(method, lambda request, method=method: self._run(method, request))
        self.server.start()

    def _run(self, method: int, request: bytes) -> bytes:
        head = ffi.from_buffer("bl_block_request *", request[:HEAD])
        self.items[method].append(request[HEAD:])
        return self.answers[method](head.count)

    def calls(self, method: int) -> int:
        return len(self.items[method])


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.create([tmp_path / "a"], device_size=64 << 20, sparse=True) as pool:
        yield pool


@pytest.fixture
def script(pool: Pool) -> Iterator[Script]:
    script = Script(pool)
    yield script
    script.server.stop()


@pytest.fixture
def index(pool: Pool, script: Script) -> Iterator[IndexClient]:
    with Client(pool) as client:
        yield IndexClient(client)


def hits(count: int) -> list[Grant]:
    return [Grant(BlockState.HIT, 0, 0, 7 + i, i, 0, (i, i)) for i in range(count)]


def test_pins_of_several_messages_are_each_released_once(
    script: Script, index: IndexClient
) -> None:
    script.answers[lib.BL_METHOD_RELEASE] = reply
    assert index.release(hits(2 * MOST + 40)) == 2 * MOST + 40
    sent = b"".join(script.items[lib.BL_METHOD_RELEASE])
    commits = ffi.from_buffer("bl_commit[]", sent)
    assert [(one.block, one.generation) for one in commits] == [
        (i, 7 + i) for i in range(2 * MOST + 40)
    ]
    assert script.calls(lib.BL_METHOD_RELEASE) == 3


def test_a_release_whose_second_message_fails_is_an_error(
    script: Script, index: IndexClient
) -> None:
    def answer(count: int) -> bytes:
        if script.calls(lib.BL_METHOD_RELEASE) > 1:
            raise ValueError("no more")
        return reply(count)

    script.answers[lib.BL_METHOD_RELEASE] = answer
    with pytest.raises(HandlerError):
        index.release(hits(MOST + 1))


def test_keys_of_several_messages_are_each_removed_and_polled_once(
    script: Script, index: IndexClient
) -> None:
    names = keys(range(MOST + 40))
    script.answers[lib.BL_METHOD_REMOVE] = lambda count: reply(count, state=1)
    script.answers[lib.BL_METHOD_REMOVING] = lambda count: reply(count, after=bytes(count))
    assert index.remove(names) == len(names)
    for method in (lib.BL_METHOD_REMOVE, lib.BL_METHOD_REMOVING):
        assert b"".join(script.items[method]) == names.tobytes()
        assert script.calls(method) == 2


def test_a_removal_polls_until_the_disk_has_attempted_it(
    script: Script, index: IndexClient
) -> None:
    names = keys(range(MOST + 40))

    def requested(count: int) -> bytes:
        return reply(count, state=script.calls(lib.BL_METHOD_REMOVING) < 4, after=bytes(count))

    script.answers[lib.BL_METHOD_REMOVE] = lambda count: reply(count, state=1)
    script.answers[lib.BL_METHOD_REMOVING] = requested
    assert index.remove(names) == len(names)
    first, rest = names[:MOST].tobytes(), names[MOST:].tobytes()
    assert script.items[lib.BL_METHOD_REMOVING] == [first, first, first, first, rest]


def test_the_wait_of_a_removal_for_an_idle_disk_is_bounded(
    script: Script, index: IndexClient
) -> None:
    def requested(count: int) -> bytes:
        pending = script.calls(lib.BL_METHOD_REMOVING) <= 2 * LOOKS
        return reply(count, state=pending, after=bytes(count))

    script.answers[lib.BL_METHOD_REMOVE] = lambda count: reply(count, state=1)
    script.answers[lib.BL_METHOD_REMOVING] = requested
    assert index.remove(keys(range(3))) == 3
    assert 1 < script.calls(lib.BL_METHOD_REMOVING) < LOOKS


def test_a_removal_without_a_disk_takes_one_call(script: Script, index: IndexClient) -> None:
    script.answers[lib.BL_METHOD_REMOVE] = reply
    assert index.remove(keys(range(3))) == 3
    assert script.calls(lib.BL_METHOD_REMOVE) == 1
    assert script.calls(lib.BL_METHOD_REMOVING) == 0


@pytest.mark.parametrize("fewer", [1, MOST])
def test_a_reply_for_fewer_keys_than_requested_is_an_error(
    script: Script, index: IndexClient, fewer: int
) -> None:
    script.answers[lib.BL_METHOD_REMOVE] = lambda count: reply(count, state=1)
    script.answers[lib.BL_METHOD_REMOVING] = lambda count: reply(
        count - fewer, after=bytes(count - fewer)
    )
    with pytest.raises(BadReplyError):
        index.remove(keys(range(MOST)))


def test_a_removal_that_a_server_cannot_report_on_is_an_error(
    script: Script, index: IndexClient
) -> None:
    def requested(count: int) -> bytes:
        raise ValueError("no report")

    script.answers[lib.BL_METHOD_REMOVE] = lambda count: reply(count, state=1)
    script.answers[lib.BL_METHOD_REMOVING] = requested
    with pytest.raises(HandlerError):
        index.remove(keys(range(3)))
