# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``scripts/demo-gpu``: two workers with GPU memory, one pool, and a router that ignores caches.

A conversation goes to the worker with the fewest outstanding tokens, whichever worker served its
last turn. Each worker has GPU memory for some blocks, which its block manager offloads to the pool
and onboards from there. The CUDA kernels move the blocks, and every byte is checked. Without a GPU,
kernels compiled for this CPU are used, and the output reports it.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path

from beluga.child import run_program
from beluga.cli.output import print_facts, print_json
from beluga.errors import BelugaError, ReplayError
from beluga.index import IndexServer
from beluga.pool import Pool, room, scratch_folder
from beluga.replay import Conversations, TraceRequest, make_workload
from beluga.router import Query, Router, Worker, make_policy

from .demo_worker import BLOCK_SIZE, Closing, Served, work

POLICY = "least-tokens"
_WORKERS = 2
_OUTSTANDING = 2 * _WORKERS  # requests in flight
_DEVICES, _DEVICE_SIZE = ("a", "b"), 96 << 20
_BLOCK_TOKENS = 16
_START_S = 300.0  # a first start compiles the kernels
_END_S = 1.0  # a worker that is compiling or copying is killed


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The result of the demo.

    ``crossed`` counts the blocks that came from the pool where the other worker had put them;
    ``requests`` counts by worker. ``engine_blocks`` is the size of a worker's GPU memory, where
    ``blocks_in_engines`` were found and from which ``blocks_evicted`` were evicted.
    """

    gpu: bool
    copied_by: str
    why_no_gpu: str
    policy: str
    requests: list[int]
    engine_blocks: int
    blocks_in_engines: int
    blocks_from_pool: int
    crossed: int
    blocks_looked_up: int
    blocks_stored: int
    blocks_evicted: int
    bytes_from_pool: int
    bytes_bounced: int
    kernel_launches: int
    wrong_blocks: int
    seconds: float


def run(shape: Conversations, engine_blocks: int | None = None) -> Report:
    """Run the demo in a temporary pool. ``engine_blocks`` is the size of each worker's GPU memory,
    by default that of the longest request.

    Raises BelugaError if that cannot hold the longest request, or a worker fails or dies.
    """
    requests = make_workload(shape)
    longest = max(len(request.hash_ids) for request in requests)
    capacity = longest if engine_blocks is None else engine_blocks
    if capacity < longest:
        raise ReplayError(
            f"an engine of {capacity} blocks is too small for a request of {longest}; give "
            f"--engine-blocks {longest} or more"
        )
    memory = Path("/dev/shm")  # noqa: S108  a fresh directory of mode 0700
    fits = memory.is_dir() and room(memory).size >= len(_DEVICES) * _DEVICE_SIZE
    with ExitStack() as stack:
        parent = memory if fits else Path(tempfile.gettempdir())
        folder = stack.enter_context(scratch_folder("demo-gpu", parent))
        devices = [str(folder / name) for name in _DEVICES]
        pool = stack.enter_context(Pool.create(devices, device_size=_DEVICE_SIZE, sparse=True))
        stack.enter_context(IndexServer(pool))
        clients = [_start(stack, devices, capacity) for _ in range(_WORKERS)]
        for connection in clients:
            _receive(connection, _START_S)
        started = time.monotonic()
        counts = _serve(requests, clients)
        seconds = time.monotonic() - started
        closings = [_close(connection) for connection in clients]
    return Report(
        gpu=all(closing.driver == "cuda" for closing in closings),
        copied_by=_copied_by(closings[0]),
        why_no_gpu=closings[0].reason,
        policy=POLICY,
        requests=counts.requests,
        engine_blocks=capacity,
        blocks_in_engines=counts.device_hits,
        blocks_from_pool=counts.onboarded,
        crossed=counts.crossed,
        blocks_looked_up=counts.looked_up,
        blocks_stored=len(counts.stored_by),
        blocks_evicted=sum(closing.evicted_blocks for closing in closings),
        bytes_from_pool=counts.onboarded * BLOCK_SIZE,
        bytes_bounced=sum(closing.bounced_bytes for closing in closings),
        kernel_launches=sum(closing.launches for closing in closings),
        wrong_blocks=counts.wrong,
        seconds=round(seconds, 3),
    )


class _Counts:
    """Return the workers' answers, request by request."""

    def __init__(self) -> None:
        self.requests = [0] * _WORKERS
        self.device_hits = self.onboarded = self.crossed = self.looked_up = self.wrong = 0
        self.stored_by: dict[int, int] = {}

    def add(self, worker: int, served: Served) -> None:
        self.requests[worker] += 1
        self.device_hits += served.device_hits
        self.onboarded += len(served.onboarded)
        self.looked_up += served.looked_up
        self.wrong += served.wrong
        self.crossed += sum(
            self.stored_by.get(block, worker) != worker for block in served.onboarded
        )
        self.stored_by.update(dict.fromkeys(served.stored, worker))


def _serve(requests: list[TraceRequest], clients: list[Connection]) -> _Counts:
    router = Router(make_policy(POLICY))
    for index in range(len(clients)):
        router.add_worker(Worker(index))
    counts, under_way = _Counts(), dict[int, list[int]]()
    ahead = iter(enumerate(requests))
    while True:
        while sum(map(len, under_way.values())) < _OUTSTANDING:
            number, request = next(ahead, (None, None))
            if number is None or request is None:
                break
            query = Query(request.input_length, _BLOCK_TOKENS)
            index = router.route(number, query).worker.worker_id
            clients[index].send(list(request.hash_ids))
            under_way.setdefault(index, []).append(number)
        if not any(under_way.values()):
            return counts
        for ready in wait(clients):
            index = clients.index(ready)  # type: ignore[arg-type]
            served = _receive(clients[index], 0.0)
            number = under_way[index].pop(0)
            router.tracker.prefill_done(number)
            router.tracker.free(number)
            assert isinstance(served, Served)  # noqa: S101  one answer for each list of ids
            counts.add(index, served)


def _start(stack: ExitStack, devices: list[str], capacity: int) -> Connection:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, devices, capacity), daemon=True)
    resource_tracker.ensure_running()  # starting it unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()  # Ctrl-C does not reach it: the connection's end stops it
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()

    def end() -> None:
        ours.close()
        process.join(_END_S)
        if process.is_alive():
            process.kill()
            process.join()

    stack.callback(end)
    return ours


def _receive(connection: Connection, timeout_s: float) -> object:
    """Return the worker's next message. Raises ReplayError if the worker failed or died."""
    try:
        if timeout_s and not connection.poll(timeout_s):
            raise ReplayError(f"a worker was not ready within {timeout_s:.0f} s")
        message = connection.recv()
    except (EOFError, ConnectionError):
        raise ReplayError("a worker ended before its work did") from None
    if isinstance(message, str) and message != "ready":
        raise ReplayError(f"a worker: {message}")
    return message


def _close(connection: Connection) -> Closing:
    connection.send(None)
    closing = _receive(connection, _START_S)
    assert isinstance(closing, Closing)  # noqa: S101  the answer to None
    return closing


def _copied_by(closing: Closing) -> str:
    if closing.driver == "cuda":
        return f"CUDA kernels on {closing.device}"
    return "the CUDA kernels, compiled for this CPU: NOT a GPU"


def _facts(report: Report) -> dict[str, object]:
    return {
        "blocks are copied by": report.copied_by,
        "routing policy": f"{report.policy} (ignores caches)",
        "requests, by worker": " + ".join(map(str, report.requests)),
        "blocks of an engine's GPU memory": f"{report.engine_blocks:,}",
        "blocks looked up": f"{report.blocks_looked_up:,}",
        "found in the engine's own memory": f"{report.blocks_in_engines:,}",
        "onboarded from the pool": f"{report.blocks_from_pool:,}",
        "of them put there by the other worker": f"{report.crossed:,}",
        "offloaded to the pool": f"{report.blocks_stored:,}",
        "evicted from GPU memory": f"{report.blocks_evicted:,}",
        "kernel launches": f"{report.kernel_launches:,}",
        "wrong blocks": report.wrong_blocks,
        "seconds": report.seconds,
    }


def main() -> None:
    """Run it, and fail if a byte was wrong or nothing came from the pool."""
    parser = argparse.ArgumentParser(prog="demo-gpu", description=__doc__)
    parser.add_argument("--conversations", type=int, default=16, metavar="N")
    parser.add_argument("--turns", type=int, default=6, metavar="N")
    parser.add_argument(
        "--engine-blocks",
        type=int,
        metavar="N",
        help="blocks of each worker's GPU memory; by default those of the longest request",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = parser.parse_args()
    if min(given.conversations, given.turns) < 1 or given.conversations * given.turns > 200:
        parser.error("give 1 to 200 turns in all")
    os.chdir("/")  # a spawned Python imports the standard library from the current folder first
    try:
        shape = Conversations(conversation_count=given.conversations, turn_count=given.turns)
        report = run(shape, given.engine_blocks)
    except BelugaError as error:
        sys.exit(f"demo-gpu: {error}")
    if given.json:
        print_json(dataclasses.asdict(report))
    else:
        print_facts(_facts(report))
    if not report.gpu:
        sys.stderr.write(
            f"demo-gpu: no GPU was used ({report.why_no_gpu}): these times do not apply to a GPU\n"
        )
    if report.wrong_blocks:
        sys.exit(f"demo-gpu: {report.wrong_blocks} blocks came with wrong bytes")
    if not report.blocks_from_pool:
        sys.exit("demo-gpu: no block came from the pool")


if __name__ == "__main__":
    run_program(main)
