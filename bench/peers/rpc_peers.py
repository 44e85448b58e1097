# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An echo through the pool's lanes, compared with the same echo by other libraries. The paper's
figures of RDMA are rows without a measurement.

Every server is a process on one core, the client is on another. In each round all of them are
measured in turn, each while the others' servers are stopped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi as core_ffi
from beluga._ffi import lib as core_lib
from beluga.child import command as child_command
from beluga.errors import BelugaError
from beluga.pool import Pool
from beluga.rpc import Client

from ..harness import drive
from ..harness.ground import coherence_of, ground
from ..harness.lines import TIMEOUT_S
from ..harness.machine import cores, memory_of, pinned
from ..harness.options import Options
from ..harness.peer import Peer
from ..harness.row import Recorder, Row
from .echoes import ECHOES, METHOD, Call, Echo, socket_folder

SIZES = (64, 16 << 10)
PAPER = {
    "RDMA, reliable connection": {1: "8.39 us round trip", 128: "4.5 M calls/s"},
    "RDMA, unreliable datagram": {1: "8.83 us round trip", 128: "6.65 M calls/s"},
}
_MOONCAKE_CASE = "Python to a master in C++"
_MOONCAKE_NOTE = "Mooncake: is_exist of one key by its client, over TCP on loopback; no echo"
# Killing the process ends all processes in its namespaces.
_NAMESPACE = (
    *("unshare", "--net", "--pid", "--fork", "--kill-child"),
    *(() if os.geteuid() == 0 else ("--user", "--map-root-user")),
)
_RUN_S = 0.2  # per measurement
_SMOKE_RUN_S = 0.005
_WARM = 20  # calls

Sample = Callable[[int], NDArray[np.uint64]]
"""Makes this number of calls. Returns the nanoseconds of each."""


class _Pausable(Protocol):
    """A server's process."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Program:
    """A server that is a program of its own."""

    process: subprocess.Popen[bytes]

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class _Arm:
    """One arm of the comparison. ``server`` replies; it is stopped while another is measured."""

    case: str
    server: _Pausable
    sample: Sample
    note: str
    peer: str | None = None
    p50: list[float] = field(default_factory=list)  # of each round
    p99: list[float] = field(default_factory=list)


def bench_rpc_peers(options: Options) -> list[Row]:
    """Return a row for each type of call and each size."""
    if len(cpus := cores()) < 2:
        return [Recorder("rpc-peers", options, {}).skipped("C to C", "needs two cores")]
    rows: list[Row] = []
    with ground(options) as pool, pinned(cpus[0]):
        own = {"memory": memory_of(pool), "coherence": coherence_of(pool)}
        recorder = Recorder("rpc-peers", options, {**own, "depth": 1, "threads": 1})
        for size in SIZES[:1] if options.smoke else SIZES:
            if size > pool.geometry.bulk_size:
                rows.append(
                    recorder.skipped("C to C", "the pool's bulk areas are smaller", bytes=size)
                )
                continue
            with _arms(pool, cpus[1], size) as arms:
                _measure(arms, options, size)
            rows += _rows(recorder, size, arms)
    return rows + _paper_rows(options)


@contextmanager
def _arms(pool: Pool, cpu: int, size: int) -> Iterator[list[_Arm]]:
    """Yield all arms that can be measured. Every server is stopped."""
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        server = stack.enter_context(Peer(pool, cpu))
        server.start("serve_echo")
        client = stack.enter_context(Client(pool, timeout_s=TIMEOUT_S))
        arms = [
            _Arm(
                "C to C",
                server,
                _from_c(client, size),
                "bl_session_call; the server's loop answers",
            ),
            _Arm(
                "Python to Python, by number",
                server,
                _from_python(lambda request: client.call(METHOD, request), size),
                "Client.call(number, bytes) of a function of Server.handle",
            ),
            _Arm(
                "Python to Python, by name",
                server,
                _from_python(lambda request: client.call("echo", request, returns=bytes), size),
                "Client.call(name, bytes) of a handler, on a thread beside the server's loop",
            ),
        ]
        server.pause()
        for echo in ECHOES.values():
            if echo.missing():
                continue
            other = _serving(stack, pool, cpu, echo, folder, size)
            call = stack.enter_context(echo.client(folder, size))
            sample = _from_python(call, size)
            sample(_WARM)
            other.pause()
            arms.append(_Arm(_case(echo), other, sample, f"{echo.name}: {echo.how}", echo.name))
        if size == SIZES[0] and _mooncake_missing() is None:
            master = stack.enter_context(_Mooncake(cpu, cores()[0]))
            arms.append(_Arm(_MOONCAKE_CASE, master, master.sample, _MOONCAKE_NOTE, "Mooncake"))
        yield arms
        for arm in arms:  # a client may close its session with the server
            arm.server.resume()


def _serving(  # noqa: PLR0913, PLR0917  where it serves
    stack: ExitStack, pool: Pool, cpu: int, echo: Echo, folder: str, size: int
) -> _Pausable:
    """Start the server of another library on this core."""
    if echo.program is not None:
        process = stack.enter_context(echo.program(folder))
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cpu})
        return _Program(process)
    peer = stack.enter_context(Peer(pool, cpu))
    peer.start("serve_other_echo", name=echo.name, folder=folder, size=size)
    return peer


class _Mooncake:
    """A process with Mooncake's client, and its master, in a network namespace of their own. Both
    sleep while there is no request.
    """

    def __init__(self, server_cpu: int, client_cpu: int) -> None:
        command = child_command(
            f"{__package__}.mooncake_calls", _master(), str(server_cpu), str(client_cpu)
        )
        self._process = subprocess.Popen(
            [*_NAMESPACE, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._requests = cast(IO[str], self._process.stdin)
        self._replies = cast(IO[str], self._process.stdout)

    def sample(self, count: int) -> NDArray[np.uint64]:
        """Make calls. Returns the nanoseconds of each."""
        self._requests.write(f"{count}\n")
        self._requests.flush()
        return np.array(json.loads(self._line()), np.uint64)

    def pause(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def _line(self) -> str:
        if not (line := self._replies.readline()):
            raise BelugaError("Mooncake's client or master has ended")
        return line

    def __enter__(self) -> _Mooncake:
        try:
            self._line()
        except BelugaError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # which also ends the processes in its namespace
        self._process.wait()
        self._requests.close()
        self._replies.close()


def _master() -> str:
    """Return the path of Mooncake's master, or ""."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        return ""
    folders = [
        Path(sys.executable).parent,
        Path(spec.submodule_search_locations[0]).parent / "bin",
    ]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    return shutil.which("mooncake_master", path=path) or ""


def _mooncake_missing() -> str | None:
    """Return the reason why Mooncake's master cannot run here, or None."""
    if not _master():
        return (
            "Mooncake Store is not installed; pip install mooncake-transfer-engine-non-cuda, or "
            "put the folder of scripts/dev/setup-mooncake on PYTHONPATH"
        )
    if shutil.which(_NAMESPACE[0]) is None:
        return "unshare is not installed; its package is util-linux"
    if subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode:
        return "no network namespace can be made here, and Mooncake listens on every address"
    return None


def _case(echo: Echo) -> str:
    return "Python to Python" if echo.program is None else "Python to C"


def _from_c(client: Client, size: int) -> Sample:
    """Call by C, under the stopwatch of the other benchmarks."""
    request, reply = np.arange(size, dtype=np.uint8), np.zeros(size, np.uint8)
    got = core_ffi.new("uint32_t *")
    message = core_ffi.new("bl_message *")
    message.request = core_ffi.from_buffer("uint8_t[]", request)
    message.reply = core_ffi.from_buffer("uint8_t[]", reply, require_writable=True)
    message.reply_size, message.request_size = got, size
    message.reply_capacity, message.method = size, core_lib.BL_METHOD_PING

    def sample(count: int) -> NDArray[np.uint64]:
        times_ns = drive.CallDriver(client.session, message, TIMEOUT_S * 10**9).sample(count)
        if got[0] != size or not np.array_equal(request, reply):
            raise BelugaError("the echo from C returned other bytes")
        return times_ns

    return sample


def _from_python(call: Call, size: int) -> Sample:
    """Call in a loop of Python, with the clock read between two calls."""
    request = np.arange(size, dtype=np.uint8).tobytes()

    def sample(count: int) -> NDArray[np.uint64]:
        if call(request) != request:
            raise BelugaError("an echo returned other bytes")
        at, clock = np.zeros(count + 1, np.uint64), time.perf_counter_ns
        at[0] = clock()
        for index in range(1, count + 1):
            call(request)
            at[index] = clock()
        return np.diff(at)

    return sample


def _measure(arms: list[_Arm], options: Options, size: int) -> None:
    """Measure every arm in every round. The first round finds how many calls a run has."""
    run_s = _SMOKE_RUN_S if options.smoke else _RUN_S
    counts: dict[int, int] = {}
    for number in range(options.pair_count):
        options.report(f"rpc-peers, {size} bytes, round {number + 1}")
        for index, arm in enumerate(arms):
            arm.server.resume()
            warm = arm.sample(_WARM)
            counts.setdefault(index, max(_WARM, int(run_s * 1e9 / float(np.median(warm)))))
            times_ns = arm.sample(counts[index])
            arm.server.pause()
            middle, high = np.percentile(times_ns, [50, 99])
            arm.p50.append(float(middle))
            arm.p99.append(float(high))


def _rows(recorder: Recorder, size: int, arms: list[_Arm]) -> Iterator[Row]:
    """Make the rows; a peer is compared with our calls by number, of Python to Python, too."""
    ours = np.array(next(arm.p50 for arm in arms if arm.case.endswith("by number")))
    for arm in arms:
        first, middle, third = np.percentile(arm.p50, [25, 50, 75])
        yield recorder.row(
            arm.case,
            peer=arm.peer,
            bytes=size,
            p50_ns=round(middle),
            p50_q1_ns=round(first),
            p50_q3_ns=round(third),
            p99_ns=round(float(np.median(arm.p99))),
            ops_per_s=round(1e9 / middle),
            ratio_to_peer=round(float(np.median(np.array(arm.p50) / ours)), 3)
            if arm.peer
            else None,
            note=arm.note,
        )
    for echo in ECHOES.values():
        if why := echo.missing():
            yield recorder.skipped(_case(echo), why, peer=echo.name, bytes=size)
    if size == SIZES[0] and (why := _mooncake_missing()):
        yield recorder.skipped(_MOONCAKE_CASE, why, peer="Mooncake", bytes=size)


def _paper_rows(options: Options) -> list[Row]:
    """Return the paper's figures of RDMA, which need adapters that this machine may not have."""
    recorder = Recorder("rpc-peers", options, {"threads": 1, "bytes": SIZES[0]})
    return [
        recorder.skipped(
            "the paper's machine",
            "not measured here; the paper has this figure of two servers with RDMA",
            peer=peer,
            depth=depth,
            paper=figure,
        )
        for peer, figures in PAPER.items()
        for depth, figure in figures.items()
    ]
