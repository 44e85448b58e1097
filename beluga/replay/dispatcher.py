# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The dispatcher: it gives request numbers to clients through a shared pipe, each at its time."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from beluga.replay.trace import TraceRequest
from beluga.threads import Thread

_TICKET_SIZE = 4  # bytes of a number in the pipe; a reader never sees part of one


class Dispatcher:
    """The writing end of the pipe. With ``speed`` None, a number is written as soon as the pipe has
    space.
    """

    def __init__(self, requests: Sequence[TraceRequest], speed: float | None) -> None:
        self._requests = requests
        self._speed = speed
        self._stopped = threading.Event()
        self._thread = Thread(target=self._write_numbers, daemon=True)
        self.read_end, self._write_end = os.pipe()

    def start(self) -> None:
        """Begin. The clients already have the reading end."""
        os.close(self.read_end)
        self.read_end = -1
        self._thread.start()

    def stop(self) -> None:
        """Stop, at the latest when no client reads any more."""
        self._stopped.set()
        if self.read_end >= 0:
            os.close(self.read_end)
            os.close(self._write_end)
        else:
            self._thread.join()

    def _write_numbers(self) -> None:
        start_s = time.monotonic()
        with suppress(BrokenPipeError), os.fdopen(self._write_end, "wb", buffering=0) as pipe:
            for number, request in enumerate(self._requests):
                if self._speed is not None:
                    passed_ms = request.timestamp - self._requests[0].timestamp
                    due_s = start_s + passed_ms / 1000 / self._speed
                    self._stopped.wait(max(0.0, due_s - time.monotonic()))
                if self._stopped.is_set():
                    return
                pipe.write(number.to_bytes(_TICKET_SIZE, "little"))


def tickets(descriptor: int, idle_s: float, idle: Callable[[], None]) -> Iterator[int]:
    """Yield the numbers that a client gets, until there are no more. ``idle()`` is called where the
    next one does not come within ``idle_s``.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        if not poll.poll(idle_s * 1000):
            idle()
        ticket = os.read(descriptor, _TICKET_SIZE)
        if not ticket:
            return
        yield int.from_bytes(ticket, "little")
