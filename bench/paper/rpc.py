# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of calls through the pool's lanes (the paper's Exp 11), compared with a bare
exchange of the same lines.

The server, and the process that answers the bare lines, run on one core; the client runs on
another. While the bare exchange runs, the server's process is stopped.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Protocol

import numpy as np
import numpy.typing as npt

from beluga._ffi import ffi, lib
from beluga.errors import raise_for_status
from beluga.pool import Pool
from beluga.rpc import Client

from .._limit import lib as limit_lib
from ..harness.ground import coherence_of, ground
from ..harness.lines import TIMEOUT_S, lines_of
from ..harness.machine import cores, memory_of, pinned
from ..harness.options import HARDWARE, SOFTWARE, Options
from ..harness.peer import Peer
from ..harness.ratio import race
from ..harness.row import Recorder, Row, calls, percentiles

DEPTHS = (1, 8, 32, 128, 256)
FENCED = 16  # lines; the smaller of the two batches that the bare exchange fences
PAPER = {
    1: "2.11 us round trip",
    128: "12.13 M calls/s",
}

_RUN_S = 0.03
_SMOKE_RUN_S = 0.004
# approximate times, which give the number of calls
_NS_PER_CALL = {1: 1500, 8: 250, 32: 90, 128: 50, 256: 50}


class _Bare:
    """The bare exchange. Every line that it sends has its own sequence number."""

    def __init__(self, pool: Pool, peer: Peer, server: Peer) -> None:
        self._pool, self._peer, self._server = pool, peer, server
        self._sequence = 1

    def speed(self, depth: int, count: int) -> float:
        """Return lines per second in each direction: the better of a fence per 16 lines and a fence
        per batch.
        """
        batches = {min(FENCED, depth), depth}
        self._server.pause()
        try:
            return max(self._run(depth, batch, count) for batch in batches)
        finally:
            self._server.resume()

    def _run(self, depth: int, batch: int, count: int) -> float:
        warm = 4 * depth
        whole = {"depth": depth, "batch": batch, "sequence": self._sequence, "count": warm + count}
        self._peer.start("answer", **whole)
        first = lines_of(self._pool, depth=depth, batch=batch, sequence=self._sequence, count=warm)
        paused = lines_of(
            self._pool, depth=depth, batch=batch, sequence=self._sequence + warm, count=count
        )
        self._sequence += warm + count
        raise_for_status(limit_lib.limit_request(first), "exchanging lines")
        start_ns = time.perf_counter_ns()
        raise_for_status(limit_lib.limit_request(paused), "exchanging lines")
        elapsed_ns = time.perf_counter_ns() - start_ns
        raise_for_status(self._peer.result()["status"], "answering lines")
        return count * 1e9 / elapsed_ns


class Caller(Protocol):
    """Makes ``count`` calls. Returns calls per second, and stores how long each call took."""

    def __call__(self, count: int, samples: npt.NDArray[np.uint64] | None = None) -> float: ...


class _Calls:
    """Echo calls by the client, from C and from Python."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._size: int = lib.BL_MESSAGE_INLINE_SIZE
        self._request = bytes(range(self._size))

    def pump_at(self, depth: int) -> Caller:
        """Return a caller from C to C with ``depth`` calls in flight."""

        def call(count: int, samples: npt.NDArray[np.uint64] | None = None) -> float:
            self._pump(depth, 4 * depth, None)
            return self._pump(depth, count, samples)

        return call

    def _pump(self, depth: int, count: int, samples: npt.NDArray[np.uint64] | None) -> float:
        requests = ffi.from_buffer("uint8_t[]", self._request * count)
        pump = ffi.new(
            "bl_pump *",
            {
                "requests": requests,
                "latencies_ns": ffi.NULL
                if samples is None
                else ffi.cast("uint64_t *", samples.ctypes.data),
                "count": count,
                "size": self._size,
                "depth": depth,
                "method": lib.BL_METHOD_PING,
            },
        )
        session = self._client.session
        start_ns = time.perf_counter_ns()
        raise_for_status(lib.bl_session_pump(session, pump, TIMEOUT_S * 10**9), "calling")
        return count * 1e9 / (time.perf_counter_ns() - start_ns)

    def loop(self, count: int, samples: npt.NDArray[np.uint64] | None = None) -> float:
        """Call from Python, one call at a time."""
        start_ns = last_ns = time.perf_counter_ns()
        for index in range(count):
            self._client.call(lib.BL_METHOD_PING, self._request)
            if samples is not None:
                now_ns = time.perf_counter_ns()
                samples[index], last_ns = now_ns - last_ns, now_ns
        return count * 1e9 / (time.perf_counter_ns() - start_ns)


def bench_rpc(options: Options) -> list[Row]:
    """Return rows: depth 1 is compared with a ping-pong of lines, greater depths with the better
    bare exchange. A pool of each coherence is measured, and one of software coherence with a
    metadata device that hardware keeps coherent.
    """
    if len(cpus := cores()) < 2:
        return [Recorder("rpc", options, {}).skipped("c", "needs two cores")]
    rows: list[Row] = []
    modes: tuple[tuple[str | None, str | None], ...] = ((options.coherence, None),)
    if not (options.pool or options.coherence):
        modes = ((SOFTWARE, None), (HARDWARE, None), (SOFTWARE, HARDWARE))
    for coherence, metadata in modes:
        setting = ground(options, coherence=coherence, metadata_coherence=metadata)
        with setting as pool, pinned(cpus[0]):
            rows += _measure(pool, cpus[1], options)
    return rows


def _measure(pool: Pool, cpu: int, options: Options) -> list[Row]:
    """Measure all rows of one pool. The other process runs on ``cpu``."""
    recorder = Recorder(
        "rpc",
        options,
        {
            "memory": memory_of(pool),
            "coherence": coherence_of(pool),
            "threads": 1,
            "bytes": lib.BL_MESSAGE_INLINE_SIZE,
        },
    )
    rows = []
    with ExitStack() as stack:
        server = stack.enter_context(Peer(pool, cpu))
        server.start("serve")
        bare = _Bare(pool, stack.enter_context(Peer(pool, cpu)), server)
        echo = _Calls(stack.enter_context(Client(pool)))
        for depth in DEPTHS:
            if depth > pool.geometry.slot_count:
                rows.append(recorder.skipped("c", "the pool's lanes have fewer slots", depth=depth))
                continue
            options.report(f"rpc c, {coherence_of(pool)}, depth {depth}")
            rows.append(_row(recorder, "c", depth, bare, echo.pump_at(depth)))
        options.report(f"rpc python, {coherence_of(pool)}")
        rows.append(_row(recorder, "python", 1, bare, echo.loop))
    return rows


def _row(recorder: Recorder, case: str, depth: int, bare: _Bare, call: Caller) -> Row:
    """Race the calls with the bare exchange, then time single calls."""
    options = recorder.options
    run_s = _SMOKE_RUN_S if options.smoke else _RUN_S
    count = int(run_s * 1e9 / _NS_PER_CALL[depth]) // 256 * 256
    ratio = race(
        lambda: bare.speed(depth, count),
        lambda: call(count),
        pair_count=options.pair_count,
        retry_count=options.retry_count,
    )
    samples = np.zeros(count, np.uint64)
    call(count, samples)
    return recorder.row(
        case,
        depth=depth,
        paper=PAPER.get(depth) if case == "c" else None,
        **calls(ratio),
        **percentiles(samples),
    )
