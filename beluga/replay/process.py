# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The child processes of a replay: their jobs, their reports in lines of JSON on their stdout, the
metrics that engines send to the server's exporter, and the dispatcher, which gives request numbers
to clients through a shared pipe, each at its time.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, cast

import msgspec

from beluga.child import start
from beluga.errors import ReplayError
from beluga.metrics import REGISTRY, Distribution, Sample
from beluga.replay.trace import TraceRequest
from beluga.threads import Thread


class Job(msgspec.Struct, frozen=True):
    """A client's only argument, passed as JSON."""

    devices: list[str]
    trace: str
    block_size: int  # bytes
    compare: bool
    namespace: str  # only of this replay: a disk may still have the blocks of others
    patient: bool  # wait for a server that is restarted, and for tiers with a backlog
    client_count: int = 1
    engine_blocks: int = 0  # of an engine's own memory; 0 is a client without one
    engine_offload: str = "wait"


class ServerJob(msgspec.Struct, frozen=True):
    """The server's only argument, passed as JSON. ``directory`` is removed at the end."""

    directory: str
    devices: list[str]
    disks: list[str]
    disk_bytes: int
    remotes: list[str]
    offload: str
    admission: str
    block_size: int
    admin: tuple[str, int] | None  # the address of the page, over TCP


class PackedMetric(msgspec.Struct, array_like=True):
    """A metric, as :class:`beluga.metrics.Sample` has it."""

    name: str
    kind: str
    help: str
    series: list[tuple[tuple[tuple[str, str], ...], float | Distribution]]  # labels and value


class EngineReport(msgspec.Struct):
    """A line that the server reads: the metrics of an engine by its number."""

    engine: int
    metrics: list[PackedMetric]


def packed(samples: Mapping[str, Sample]) -> list[PackedMetric]:
    """Return samples in the form that JSON has."""
    return [
        PackedMetric(
            name,
            sample.kind,
            sample.help,
            list(sample.series.items()),
        )
        for name, sample in samples.items()
    ]


def include(line: bytes) -> None:
    """Show an engine's metrics among those of this process, with its number as their label."""
    report = msgspec.json.decode(line, type=EngineReport)
    engine = str(report.engine)
    REGISTRY.include(
        engine,
        {
            metric.name: Sample(
                metric.kind,
                metric.help,
                {
                    tuple(sorted([("engine", engine), *labels])): value
                    for labels, value in metric.series
                },
            )
            for metric in report.metrics
        },
    )


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


_STOP_TIMEOUT_S = 10.0


class ProcessKilledError(ReplayError):
    """A process of the replay was ended by a signal."""


def report(message: Mapping[str, object]) -> None:
    """Report to the parent. If the parent has ended, the child exits, too."""
    try:
        os.write(sys.stdout.fileno(), msgspec.json.encode(message) + b"\n")
    except BrokenPipeError:
        sys.exit(1)


class Process:
    """A child process that runs a module of this package, until :meth:`stop` at the latest.

    The parent handles Ctrl-C and ends its children.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], stdin: int) -> None:
        self.name = name
        self._sending = threading.Lock()
        self._child = start(module, *arguments, stdin=stdin, stdout=subprocess.PIPE)

    @property
    def stdout(self) -> IO[bytes]:
        """The child's stdout, from which its reports come."""
        return cast("IO[bytes]", self._child.stdout)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def next_report(self) -> dict[str, Any]:
        """Return the child's next report. Raises ReplayError if it failed or died without a
        report.
        """
        line = self.stdout.readline()
        message: dict[str, Any] = msgspec.json.decode(line) if line.endswith(b"\n") else {}
        if "error" in message:
            raise ReplayError(f"{self.name}: {message['error']}")
        if not message:
            code = self._child.wait()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            kind = ProcessKilledError if code < 0 else ReplayError
            raise kind(f"{self.name} ended before its work was done: {how}")
        return message

    def send(self, message: object) -> None:
        """Write a line of JSON to the child's stdin, unless the child has ended."""
        with self._sending, suppress(OSError, ValueError):
            stdin = cast("IO[bytes]", self._child.stdin)
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()

    def stop(self) -> None:
        """End the child by closing its stdin, or else by signals."""
        if self._child.stdin is not None:
            with suppress(OSError):  # unread output has no reader any more
                self._child.stdin.close()
        else:
            self._child.terminate()
        try:
            self._child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self.stdout.close()
