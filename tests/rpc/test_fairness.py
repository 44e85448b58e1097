# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fairness is measured in the server's work and not in time: one quantum of every other session. A
handler blocks the server while rings are filled, so that the waiting requests are known exactly
when it continues. The simulator's oracle (``tests/sim/native/scenarios/turns.c``) covers every
interleaving.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.blocks import eventually, keys
from support.forge import Lane, bulk_payload, write

from beluga._ffi import ffi, lib
from beluga.index import IndexServer
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, ServerStat

HOLD, VICTIM = METHOD_USER, METHOD_USER + 1
QUANTUM_REQUESTS, QUANTUM_KEYS = 64, 256
AGGRESSORS = 3


@pytest.fixture
def pool(shm: Path, coherence: str) -> Iterator[Pool]:
    with Pool.create(
        [shm / "a"], device_size=64 << 20, coherence=coherence, sparse=True, slot_count=256
    ) as pool:
        yield pool


class Crowd:
    """A server that can be blocked, and its work before it served the victim."""

    def __init__(self, pool: Pool, stack: ExitStack) -> None:
        self.pool = pool
        self.server = IndexServer(pool)
        self.served: list[ServerStat] = []
        self._held, self._go = threading.Event(), threading.Event()
        self.server.handle(HOLD, self._hold)
        self.server.handle(VICTIM, self._note)
        stack.enter_context(self.server)
        self.clients = [stack.enter_context(Client(pool)) for _ in range(AGGRESSORS + 2)]

    def _hold(self, _: bytes) -> bytes:
        self._held.set()
        self._go.wait(60)
        return b""

    def _note(self, _: bytes) -> bytes:
        self.served.append(self.server.stat())
        return b""

    @contextmanager
    def held(self, client: Client) -> Iterator[ServerStat]:
        """Yield its counters while the server waits in a handler."""
        self._held.clear()
        self._go.clear()
        call = threading.Thread(target=client.call, args=(HOLD,), kwargs={"timeout_s": 60})
        call.start()
        try:
            assert self._held.wait(60)
            yield self.server.stat()
        finally:
            self._go.set()
            call.join()


def long_call() -> bytes:
    head = ffi.new("bl_block_request *", {"count": QUANTUM_KEYS})
    return bytes(ffi.buffer(head)) + keys(range(QUANTUM_KEYS)).tobytes()


@pytest.fixture
def crowd(pool: Pool) -> Iterator[Crowd]:
    with ExitStack() as stack:
        yield Crowd(pool, stack)


@pytest.mark.parametrize("long", [False, True], ids=["short calls", "calls of 256 keys"])
@pytest.mark.parametrize("position", range(AGGRESSORS + 1))
def test_a_victim_waits_for_one_quantum_of_each_other(
    crowd: Crowd, position: int, long: bool
) -> None:
    holder, *others = crowd.clients
    victim = others.pop(position)  # before, between and after the others in the server's order
    lanes = [Lane(client) for client in others]
    data = long_call()
    with crowd.held(holder) as before:
        for lane in lanes:
            write(crowd.pool, lane.bulk_in, data)
            for sequence in range(1, lane.slots + 1):
                if long:
                    flags = lib.BL_MESSAGE_BULK
                    lane.send(sequence, lib.BL_METHOD_LOOKUP, bulk_payload(data), flags=flags)
                else:
                    lane.send(sequence, lib.BL_METHOD_PING, b"")
        Lane(victim).send(1, VICTIM, b"")
    assert eventually(lambda: all(lane.answered(lane.slots) for lane in lanes))
    (then,) = crowd.served
    assert then.call_count - before.call_count - 1 <= AGGRESSORS * QUANTUM_REQUESTS  # 1: the hold
    assert then.key_count - before.key_count - 1 <= AGGRESSORS * QUANTUM_KEYS
    after = crowd.server.stat()
    assert after.call_count - before.call_count == AGGRESSORS * lanes[0].slots + 2
    assert after.error_count == 0
    assert after.quantum_request_max <= QUANTUM_REQUESTS
    assert after.quantum_key_max == (QUANTUM_KEYS if long else after.quantum_request_max)
    assert after.wait_request_max <= (AGGRESSORS + 1) * QUANTUM_REQUESTS
    assert after.wait_key_max <= (AGGRESSORS + 1) * QUANTUM_KEYS


def test_a_call_of_more_keys_than_a_quantum_is_refused(crowd: Crowd) -> None:
    lane = Lane(crowd.clients[0])
    head = ffi.new("bl_block_request *", {"count": QUANTUM_KEYS + 1})
    data = bytes(ffi.buffer(head)) + keys(range(QUANTUM_KEYS + 1)).tobytes()
    write(crowd.pool, lane.bulk_in, data)
    lane.send(1, lib.BL_METHOD_LOOKUP, bulk_payload(data), flags=lib.BL_MESSAGE_BULK)
    assert eventually(lambda: lane.answered(1))
    assert crowd.server.stat().error_count == 1
