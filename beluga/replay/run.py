# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A replay: it starts a new pool, a server process and client processes, and sums their reports.

No process and no file is left behind, whatever happens, even after Ctrl-C.
"""

from __future__ import annotations

import queue
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from beluga.errors import BadValueError, ReplayError
from beluga.pool import Pool, room, scratch_folder, show_size
from beluga.replay.blocks import EngineTally
from beluga.replay.process import (
    DEVICE_COUNT,
    Dispatcher,
    Job,
    PoolSize,
    Process,
    ProcessKilledError,
    ReplayOptions,
)
from beluga.replay.trace import TraceRequest, ideal_hit_rate, unique_count, write_trace
from beluga.threads import Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of a replay. Rates are 0..1, bytes are of payload, and the RPC is a ping after each
    request.

    ``verify_errors`` counts blocks fetched with wrong bytes. ``mismatches`` counts those that the
    cache found changed and did not return. ``blocks_put_again`` counts puts of blocks that had been
    stored before and were lost: it is 0 if every block that was stored stays a hit.
    ``server_restarts`` counts servers that were killed and started again. ``blocks_got`` came from
    the pool: they are the hits, unless engines have memory of their own (``engines``).
    ``put_gb_per_s`` and ``get_gb_per_s`` are for one client while it puts or gets, with checksums,
    copies and calls to the server.
    """

    requests: int
    blocks_looked_up: int
    blocks_hit: int
    hit_rate: float
    ideal_hit_rate: float
    blocks_got: int
    blocks_put: int
    blocks_refused: int
    bytes_put: int
    bytes_got: int
    blocks_put_again: int
    verify_errors: int
    mismatches: int
    seconds: float
    put_gb_per_s: float
    get_gb_per_s: float
    rpc_p50_us: float
    rpc_p99_us: float
    server_restarts: int = 0
    engines: EngineTally | None = None


def summarize(
    requests: Sequence[TraceRequest],
    block_size: int,
    seconds: float,
    tallies: Sequence[dict[str, Any]],
    server_restarts: int = 0,
) -> Result:
    """Compute the result from the ``Tally`` of every client."""

    def total(name: str) -> Any:
        return sum(tally[name] for tally in tallies)

    rpc_us = np.concatenate([np.array(tally["rpc_ns"], float) for tally in tallies]) / 1000
    p50, p99 = np.percentile(rpc_us, [50, 99]) if len(rpc_us) else (0.0, 0.0)
    bytes_put, bytes_got = total("put_count") * block_size, total("got_count") * block_size
    return Result(
        requests=total("request_count"),
        blocks_looked_up=total("looked_up_count"),
        blocks_hit=total("hit_count"),
        hit_rate=total("hit_count") / max(1, total("looked_up_count")),
        ideal_hit_rate=ideal_hit_rate(requests),
        blocks_got=total("got_count"),
        blocks_put=total("put_count"),
        blocks_refused=total("refused_count"),
        bytes_put=bytes_put,
        bytes_got=bytes_got,
        blocks_put_again=max(total("put_count") - unique_count(requests), 0),
        verify_errors=total("wrong_count"),
        mismatches=total("mismatch_count"),
        seconds=seconds,
        put_gb_per_s=bytes_put / 1e9 / max(total("put_s"), 1e-9),
        get_gb_per_s=bytes_got / 1e9 / max(total("get_s"), 1e-9),
        rpc_p50_us=float(p50),
        rpc_p99_us=float(p99),
        server_restarts=server_restarts,
        engines=_engines([tally["engine"] for tally in tallies if "engine" in tally]),
    )


def _engines(tallies: Sequence[dict[str, Any]]) -> EngineTally | None:
    """Sum the counts of all engines, and list the targets that any of them missed at the end."""
    if not tallies:
        return None
    counts = [field.name for field in fields(EngineTally) if field.name != "missed_targets"]
    missed = tuple(text for tally in tallies for text in tally["missed_targets"])
    return EngineTally(
        **{name: sum(tally[name] for tally in tallies) for name in counts}, missed_targets=missed
    )


Note = Callable[[str], None]
Advance = Callable[[int, int], None]

_MEMORY = Path("/dev/shm")  # noqa: S108  the files lie in a fresh directory of mode 0700


def replay(
    requests: Sequence[TraceRequest], options: ReplayOptions, *, note: Note, advance: Advance
) -> Result:
    """Replay the requests. ``note`` prints messages, ``advance`` gets (done, total).

    Raises ReplayError if a process dies or fails, and a PoolError if there is no space. With a tier
    below the pool, a server that is killed is started again.
    """
    options.check()
    _refuse_small_engines(requests, options.engine_blocks)
    size = options.size_for(requests)
    with ExitStack() as cleanup:
        parent = _choose_parent(size.total_size, note)
        for disk in options.disks:
            if created := _made_for(Path(disk)):
                cleanup.callback(_remove, created)
        directory = cleanup.enter_context(scratch_folder("replay", parent))
        devices = _make_pool(directory, size)
        trace = directory / "trace.jsonl"
        write_trace(requests, trace)
        namespace = f"beluga replay {uuid.uuid4()}"
        job = Job(options, str(directory), devices, str(trace), namespace)
        dispatcher = Dispatcher(requests, options.speed)
        # this runs after the clients have ended, because it may wait for a reader
        cleanup.callback(dispatcher.stop)
        clients = _Processes(cleanup, job, dispatcher.read_end, note=note)
        start_s = time.monotonic()
        dispatcher.start()
        tallies = clients.watch(lambda done: advance(done, len(requests)))
        seconds = time.monotonic() - start_s
    return summarize(requests, options.block_size, seconds, tallies, clients.server_restarts)


class _Processes:
    """The server, and the clients, which all read the same pipe."""

    def __init__(self, cleanup: ExitStack, job: Job, tickets: int, *, note: Note) -> None:
        self._messages: queue.Queue[tuple[int, dict[str, Any] | ReplayError]] = queue.Queue()
        self._cleanup, self._note = cleanup, note
        self._again, self._argument = job.options.patient, msgspec.json.encode(job).decode()
        self.server_restarts = 0
        self._server = server = self._serve()
        self._clients = []
        for index in range(job.options.client_count):
            client = Process(f"client {index}", "beluga.replay.client", [self._argument], tickets)
            cleanup.callback(client.stop)
            self._clients.append(client)
        for client in self._clients:
            client.next_report()
        for index, process in enumerate([*self._clients, server]):
            self._start_reader(index, process)

    def _serve(self) -> Process:
        server = Process("the server", "beluga.replay.server", [self._argument], subprocess.PIPE)
        self._cleanup.callback(server.stop)
        if page := server.next_report().get("page"):
            self._note(f"page at {page}")
        return server

    def _start_reader(self, index: int, process: Process) -> None:
        Thread(target=self._read_reports, args=(index, process), daemon=True).start()

    def watch(self, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Return the tally of every client. Raises ReplayError as soon as one of the processes
        fails.
        """
        done = [0] * len(self._clients)
        tallies: list[dict[str, Any]] = []
        while len(tallies) < len(self._clients):
            index, message = self._messages.get()
            if isinstance(message, ProcessKilledError) and index == len(done) and self._again:
                self.server_restarts += 1
                self._server = self._serve()
                self._start_reader(index, self._server)
                continue
            if isinstance(message, ReplayError):
                raise message
            if "metrics" in message:
                self._server.send({"engine": index, "metrics": message["metrics"]})
            if "tally" in message:
                tallies.append(message["tally"])
                done[index] = message["tally"]["request_count"]
            else:
                done[index] = message["done"]
            advance(sum(done))
        return tallies

    def _read_reports(self, index: int, process: Process) -> None:
        """Forward a process's reports, until its tally or its end."""
        try:
            while True:
                message = process.next_report()
                self._messages.put((index, message))
                if "tally" in message:
                    return
        except ReplayError as error:
            self._messages.put((index, error))


def _refuse_small_engines(requests: Sequence[TraceRequest], engine_blocks: int) -> None:
    """Raise BadValueError if an engine's memory does not hold the longest request."""
    longest = max((len(set(request.hash_ids)) for request in requests), default=0)
    if 0 < engine_blocks < longest:
        raise BadValueError(
            f"an engine of {engine_blocks} blocks is too small for a request of {longest}; give "
            f"--engine-blocks {longest} or more"
        )


def _choose_parent(size: int, note: Note) -> Path:
    """Return a directory with space for a pool of ``size`` bytes, in memory if possible."""
    parent = Path(tempfile.gettempdir())
    if _MEMORY.is_dir():
        free = room(_MEMORY).size
        if size <= free:
            parent = _MEMORY
        else:
            note(
                f"{_MEMORY} has room for {show_size(free)}, the pool needs {show_size(size)}: "
                f"using files in {parent}"
            )
    return parent


def _made_for(disk: Path) -> Path | None:
    """Return what a disk tier of this path will create, or None if it is there already."""
    path = disk / "blocks" if disk.is_dir() else disk
    return None if path.exists() else path


def _remove(path: Path) -> None:
    """Remove a new disk tier: its blocks belong to no other pool."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _make_pool(directory: Path, size: PoolSize) -> list[str]:
    devices = [str(directory / f"device.{index}") for index in range(DEVICE_COUNT)]
    Pool.create(
        devices,
        device_size=size.device_size,
        max_blocks=size.block_count_max,
        lane_count=size.lane_count,
    ).close()
    return devices
