# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options of a replay, and its child processes: their jobs, their reports in lines of JSON on
their stdout, the metrics that engines send to the server's exporter, and the dispatcher, which
gives request numbers to clients through a shared pipe, each at its time.
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
from dataclasses import dataclass
from typing import IO, Any, cast

import msgspec

from beluga.child import start
from beluga.choices import REPLAY_SIZE_MAX
from beluga.errors import ReplayError
from beluga.metrics import REGISTRY, Distribution, Sample
from beluga.pool import STRIPE_SIZE, show_size
from beluga.replay.trace import TraceRequest, unique_count
from beluga.threads import Thread

DEVICE_COUNT = 2

_BLOCK_SIZE_MIN = 64
_PAGE_SIZE = 4096
_LANE_COUNT_MIN = 16
_LANE_SIZE = 512 << 10  # more than the default size of a lane's slots and bulk areas
_TABLE_LINES_SIZE = 2 * 64  # one entry in each half
_SPARE_STRIPES = 4


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Arguments of ``Pool.create``. Sizes are in bytes."""

    device_size: int
    block_count_max: int
    lane_count: int

    @property
    def total_size(self) -> int:
        """The size of all devices together."""
        return self.device_size * DEVICE_COUNT


def pool_size_for(
    requests: Sequence[TraceRequest],
    block_size: int,
    wanted_size: int | None,
    *,
    session_count: int = 1,
) -> PoolSize:
    """Return the least size that holds every block, or a pool of ``wanted_size`` bytes if that is
    given. Raises ReplayError if that is too small, or if the blocks need more than a pool can have.
    """
    block_count, lane_count = unique_count(requests) + 1024, max(_LANE_COUNT_MIN, session_count)
    if wanted_size is not None:
        device_size = wanted_size // DEVICE_COUNT // STRIPE_SIZE * STRIPE_SIZE
        stripes_min = (lane_count * _LANE_SIZE + block_count * _TABLE_LINES_SIZE) // STRIPE_SIZE + 8
        if wanted_size < stripes_min * STRIPE_SIZE:
            raise ReplayError(
                f"a pool (--pool-bytes) of {show_size(wanted_size)} has no room for its tables and "
                f"a few blocks; give at least {show_size(stripes_min * STRIPE_SIZE)}"
            )
        return PoolSize(device_size, block_count, lane_count)
    chunks_size = block_size // 4096  # an upper bound for the checksums
    stored_size = -(-(block_size + chunks_size) // _PAGE_SIZE) * _PAGE_SIZE
    size = block_count * (stored_size + _TABLE_LINES_SIZE) + lane_count * _LANE_SIZE
    stripe_count = size // DEVICE_COUNT // STRIPE_SIZE + 1 + _SPARE_STRIPES
    pool = PoolSize(stripe_count * STRIPE_SIZE, block_count, lane_count)
    if pool.total_size > REPLAY_SIZE_MAX:
        raise ReplayError(
            f"{block_count:,} blocks of {show_size(block_size)} do not fit into a pool, which has "
            f"at most {show_size(REPLAY_SIZE_MAX)}; give a smaller --block-bytes"
        )
    return pool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of a replay. Sizes are in bytes. ``speed`` 1 keeps the trace's own times, and
    None never waits. ``disks`` to ``admission`` are the tiers below the pool
    (:class:`beluga.tiers.TierSettings`). ``admin`` is the address of a page that shows the
    replay. With ``engine_blocks``, each client is an engine with memory for this many blocks,
    which it offloads by a policy of :data:`beluga.kvbm.OFFLOAD_POLICIES`.
    """

    client_count: int = 2
    block_size: int = 4096
    pool_size: int | None = None  # None: a pool that holds all blocks of the trace
    speed: float | None = None
    compare: bool = True
    disks: tuple[str, ...] = ()
    disk_size: int = 0
    remotes: tuple[str, ...] = ()
    offload: str = "wait"
    admission: str = "always"
    admin: tuple[str, int] | None = None
    engine_blocks: int = 0
    engine_offload: str = "wait"

    @property
    def patient(self) -> bool:
        """Whether clients wait for a server that is restarted, and for tiers with a backlog."""
        return bool(self.disks or self.remotes)

    def check(self) -> None:
        """Raise ReplayError for sizes that fit no trace."""
        if self.block_size < _BLOCK_SIZE_MIN or self.block_size % 8:
            raise ReplayError(
                f"a block (--block-bytes) of {self.block_size} bytes is too small or uneven; give "
                f"a multiple of 8, at least {_BLOCK_SIZE_MIN}"
            )
        self.size_for([])

    def size_for(self, requests: Sequence[TraceRequest]) -> PoolSize:
        """Return the size of the pool for these requests. Raises ReplayError if it is too small for
        them, or larger than a pool can be.
        """
        return pool_size_for(
            requests,
            self.block_size,
            self.pool_size,
            session_count=self.client_count * (2 if self.engine_blocks else 1),
        )


class Job(msgspec.Struct, frozen=True):
    """The only argument of a client or the server, passed as JSON. The server removes the
    ``directory`` of the devices at its end.
    """

    options: ReplayOptions
    directory: str
    devices: list[str]
    trace: str
    namespace: str  # only of this replay: a disk may still have the blocks of others


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
