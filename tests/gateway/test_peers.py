# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The counts and messages that the processes of one gateway share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from routed import run, until

from beluga.gateway.peers import Peers, ProcessResources, memory_size
from beluga.router import Worker

PROCESSES = 3


@pytest.fixture
def peers() -> Iterator[list[Peers]]:
    """Three processes in one, each with descriptors of its own."""
    with ExitStack() as stack:
        memory = os.memfd_create("test")
        stack.callback(os.close, memory)
        os.ftruncate(memory, memory_size(PROCESSES))
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(PROCESSES)]
        for receive, send in pairs:
            for end in (receive, send):
                end.setblocking(False)
                stack.enter_context(end)
        made = [
            Peers(
                ProcessResources(
                    number,
                    PROCESSES,
                    control=-1,
                    memory=os.dup(memory),
                    mailboxes=[os.dup(send.fileno()) for _, send in pairs],
                    mailbox=os.dup(pairs[number][0].fileno()),
                    listeners=[],
                ),
                lambda number=number: lost.append(number),
            )
            for number in range(PROCESSES)
        ]
        yield made


lost: list[int] = []


def test_a_message_reaches_all_other_processes(peers: list[Peers]) -> None:
    async def scenario() -> None:
        sent: list[tuple[int, Worker, list[int]]] = []
        made: list[tuple[int, str, int]] = []
        for each in peers:
            number = each.number

            def was_sent(worker: Worker, hashes: Sequence[int], number: int = number) -> None:
                sent.append((number, worker, list(hashes)))

            def was_made(name: str, worker: int, number: int = number) -> None:
                made.append((number, name, worker))

            each.follow(sent=was_sent, made=was_made, look=lambda: None)
        peers[1].sent(Worker(7), [1, -1])
        peers[1].made("resp_a", 7)
        await until(lambda: len(sent) == len(made) == PROCESSES - 1)
        assert sorted(sent) == [(n, Worker(7), [1, (1 << 64) - 1]) for n in (0, 2)]
        assert sorted(made) == [(n, "resp_a", 7) for n in (0, 2)]
        for each in peers:
            each.close()

    run(scenario)


def test_a_full_mailbox_drops_messages_without_blocking(peers: list[Peers]) -> None:
    lost.clear()
    for _ in range(1000):
        peers[0].sent(Worker(1), range(1000))
    assert set(lost) == {0}
    assert not peers[0].let_longest_try()


def test_the_process_with_the_oldest_request_is_served_first(peers: list[Peers]) -> None:
    first, second, third = peers
    assert not first.let_longest_try()
    second.waits(2, 10.0)
    third.waits(1, 5.0)
    assert first.let_longest_try()
    first.waits(3, 1.0)
    assert not first.let_longest_try(), "its own request waits longest"
    assert first.waiting_elsewhere() == 3
    first.waits(3, 7.0)
    assert first.let_longest_try()
    third.waits(0, 0.0)
    assert not first.let_longest_try()


def test_the_limit_of_bodies_covers_all_processes(peers: list[Peers]) -> None:
    peers[0].hold(5)
    peers[1].hold(7)
    assert [one.held_elsewhere() for one in peers] == [7, 5, 12]
