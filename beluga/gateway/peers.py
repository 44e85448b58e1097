# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the processes of one gateway share: counts in shared memory, and messages.

The counts are the state that decisions need: each worker's load (``beluga/router/load/shared.py``),
how many requests wait in each process and since when, and the memory of bodies. A process writes
its own words only, and reads those of the others without a lock.

The messages pass on what has just changed in a process: the prompts that it sent to a worker, the
responses that a worker made, and that a worker may have room for the request that waits longest.
Each process has a mailbox, a datagram socket that the supervisor keeps open. A process that does
not read its mailbox loses messages: then a prefix is computed again, a response is looked for at
another worker, or a waiting request is tried up to ``POLL_S`` later.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
from array import array
from collections.abc import Callable, Sequence

import msgspec

from beluga.router import SharedLoads, Worker

WORKERS_MAX = 4096
"""The number of workers, including removed ones that still have requests."""
POLL_S = 0.05
"""Interval at which a process tries its waiting requests without a message."""
_WORDS = 8  # 64-bit words of a process, so that no line has two writers
_WAITING, _SINCE_NS, _BODIES = range(3)
_HEAD = struct.Struct("<cQ")  # the kind of a message, and the worker
_SENT, _MADE, _LOOK = b"s", b"m", b"l"
_BLOCKS_MAX = 16_000  # in a message; a datagram has at most about 200 kB
_U64 = (1 << 64) - 1
_MESSAGE_SIZE_MAX = _HEAD.size + 8 * _BLOCKS_MAX


class ProcessResources(msgspec.Struct):
    """One process's place among ``processes``: its number, and the descriptors that it inherits."""

    number: int
    processes: int
    control: int
    memory: int
    mailboxes: list[int]  # of all processes, to send to
    mailbox: int  # this process's, to receive from
    listeners: list[int]

    @classmethod
    def read(cls, text: str) -> ProcessResources:
        """Read the place that the supervisor has written."""
        return msgspec.json.decode(text, type=cls)


def memory_size(processes: int) -> int:
    """Return the bytes of the shared memory."""
    return _loads_offset(processes) + SharedLoads.size(processes, WORKERS_MAX)


def words_of(memory: mmap.mmap, processes: int, number: int) -> tuple[memoryview, memoryview]:
    """Return the bytes that one process writes: its words, and its loads."""
    whole, at = memoryview(memory), number * _WORDS * 8
    size = SharedLoads.size(1, WORKERS_MAX)
    begin = _loads_offset(processes) + number * size
    return whole[at : at + _WORDS * 8], whole[begin : begin + size]


def _loads_offset(processes: int) -> int:
    return -(-processes * _WORDS * 8 // 128) * 128


class Peers:
    """The other processes of this gateway. ``lost`` is called for each message that is lost."""

    def __init__(self, place: ProcessResources, lost: Callable[[], None]) -> None:
        self.number, self.processes = place.number, place.processes
        self._lost = lost
        memory = mmap.mmap(place.memory, memory_size(place.processes))
        self._words = memoryview(memory)[: place.processes * _WORDS * 8].cast("q")
        # The memory itself: a memoryview that is in use at the end makes the garbage collector
        # warn.
        self.loads = SharedLoads(
            memory,
            place.processes,
            WORKERS_MAX,
            place.number,
            offset=_loads_offset(place.processes),
        )
        self._mailbox = inherited(place.mailbox)
        self._others = {
            number: inherited(descriptor)
            for number, descriptor in enumerate(place.mailboxes)
            if number != place.number
        }
        self._sent: Callable[[Worker, Sequence[int]], None] = _ignore
        self._made: Callable[[str, int], None] = _ignore
        self._look: Callable[[], None] = _ignore
        os.close(place.memory)
        os.close(place.mailboxes[place.number])

    def follow(
        self,
        *,
        sent: Callable[[Worker, Sequence[int]], None],
        made: Callable[[str, int], None],
        look: Callable[[], None],
    ) -> None:
        """Read the mailbox from now on, and call these for its messages."""
        self._sent, self._made, self._look = sent, made, look
        asyncio.get_running_loop().add_reader(self._mailbox, self.read)

    def close(self) -> None:
        """Read no more messages."""
        asyncio.get_running_loop().remove_reader(self._mailbox)
        for one in (self._mailbox, *self._others.values()):
            one.close()

    def read(self) -> None:
        """Read all messages that have arrived."""
        while True:
            try:
                message = self._mailbox.recv(_MESSAGE_SIZE_MAX)
            except OSError:  # there is none
                return
            kind, number = _HEAD.unpack_from(message)
            if kind == _SENT:
                self._sent(Worker(number), array("Q", message[_HEAD.size :]))
            elif kind == _MADE:
                self._made(message[_HEAD.size :].decode(), number)
            else:
                self._look()

    def sent(self, worker: Worker, hashes: Sequence[int]) -> None:
        """Report a prompt's blocks, which this process has sent to a worker."""
        blocks = array("Q", [block & _U64 for block in hashes[:_BLOCKS_MAX]])
        self._send_all(_HEAD.pack(_SENT, worker.worker_id) + blocks.tobytes())

    def made(self, response: str, worker: int) -> None:
        """Report a response. Another process has the message before its client has the response."""
        self._send_all(_HEAD.pack(_MADE, worker) + response.encode())

    def waits(self, count: int, since_s: float) -> None:
        """Store how many requests wait here, and since when the first of them does."""
        self._write(_SINCE_NS, int(since_s * 1e9))
        self._write(_WAITING, count)

    def waiting_elsewhere(self) -> int:
        """Return how many requests wait in other processes."""
        return sum(self._read(number, _WAITING) for number in self._others)

    def let_longest_try(self) -> bool:
        """Let the process try whose first request waits longest. Returns False if this is the one,
        or if no request waits elsewhere.
        """
        first = {
            number: self._read(number, _SINCE_NS)
            for number in self._others
            if self._read(number, _WAITING)
        }
        if not first:
            return False
        number = min(first, key=first.__getitem__)
        if self._read(self.number, _WAITING) and first[number] >= self._read(
            self.number, _SINCE_NS
        ):
            return False
        return self._send(self._others[number], _HEAD.pack(_LOOK, 0))

    def hold(self, bodies_size: int) -> None:
        """Store the memory of this process's bodies."""
        self._write(_BODIES, bodies_size)

    def held_elsewhere(self) -> int:
        """Return the memory of other processes' bodies in bytes."""
        return sum(self._read(number, _BODIES) for number in self._others)

    def _write(self, word: int, value: int) -> None:
        self._words[self.number * _WORDS + word] = value

    def _read(self, number: int, word: int) -> int:
        return int(self._words[number * _WORDS + word])

    def _send_all(self, message: bytes) -> None:
        for one in self._others.values():
            self._send(one, message)

    def _send(self, mailbox: socket.socket, message: bytes) -> bool:
        try:
            mailbox.send(message)
        except OSError:  # the peer's mailbox is full
            self._lost()
            return False
        return True


def inherited(descriptor: int) -> socket.socket:
    """Return the socket that this process inherited; its own children do not."""
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def _ignore(*_: object) -> None:
    """Drop a message that arrives before a handler is registered."""
