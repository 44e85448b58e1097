# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A client dies or stops: its grants and pins end, or stay for it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

from support import roles
from support.blocks import eventually, held, keys, put, states
from support.role import Process

from beluga.index import IndexClient, IndexServer

MIB = 1 << 20


def test_grants_pins_and_lane_of_a_killed_client_are_released(
    server: IndexServer, index: IndexClient, paths: list[Path]
) -> None:
    put(index, [1, 2])
    for _ in range(9):  # more often than there are lanes
        with Process(roles.hold_blocks, paths) as client:
            assert json.loads(client.request('["pin", [1, 2]]')) == ["HIT", "HIT"]
            assert json.loads(client.request('["reserve", [3, 4, 5]]')) == ["GRANTED"] * 3
            assert states(index.reserve(keys([3]), length=MIB)) == ["PENDING"]
            client.kill()
        assert eventually(lambda: server.stat().live_count == 1)
        stat = index.stat()
        assert (stat.grant_count, stat.pinned_count, stat.held_bytes) == (0, 0, 0)
        assert stat.used_bytes == 2 * MIB
    assert states(index.reserve(keys([3, 4, 5]), length=MIB)) == ["GRANTED"] * 3


def test_committed_blocks_of_a_killed_client_stay(
    server: IndexServer, index: IndexClient, paths: list[Path]
) -> None:
    with Process(roles.hold_blocks, paths) as client:
        client.request('["reserve", [1, 2, 3]]')
        assert json.loads(client.request('["commit", [1, 2]]')) == [0, 0]
        client.kill()
    assert eventually(lambda: index.stat().grant_count == 0)
    assert held(index, [1, 2, 3]) == {1, 2}


def test_a_block_removed_while_pinned_is_freed_when_its_reader_dies(
    index: IndexClient, paths: list[Path]
) -> None:
    put(index, [1])
    with Process(roles.hold_blocks, paths) as reader:
        reader.request('["pin", [1]]')
        index.remove(keys([1]))
        assert index.stat().used_bytes == MIB
        reader.kill()
    assert eventually(lambda: index.stat().used_bytes == 0)


def test_closing_a_session_ends_its_grants_and_pins(attach: Callable[[], IndexClient]) -> None:
    one, two = attach(), attach()
    put(one, [1])
    one.lookup(keys([1]), pin=True)
    one.reserve(keys([2]), length=MIB)
    one._client.close()
    stat = two.stat()
    assert (stat.grant_count, stat.pinned_count, stat.abort_count) == (0, 0, 1)


def test_a_stopped_client_keeps_its_grants_and_pins(index: IndexClient, paths: list[Path]) -> None:
    put(index, [1])
    with Process(roles.hold_blocks, paths) as client:
        client.request('["pin", [1]]')
        client.request('["reserve", [2]]')
        client.signal(signal.SIGSTOP)
        time.sleep(6)  # longer than the heartbeat timeout
        assert (index.stat().grant_count, index.stat().pinned_count) == (1, 1)
        client.signal(signal.SIGCONT)
        assert json.loads(client.request('["commit", [2]]')) == [0]
    assert held(index, [1, 2]) == {1, 2}
