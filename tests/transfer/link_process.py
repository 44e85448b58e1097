# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes that share a link, for ``test_link_processes.py``: one command, JSON on its output."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from beluga_bench.system.throttlers import Queue

from beluga.pool import Pool
from beluga.transfer import (
    CpuEngine,
    Direction,
    IoHandle,
    Link,
    LinkSettings,
    Plan,
    Speed,
    TransferClass,
    plan_blocks,
)
from beluga.transfer.link import LinkDirection

RATE = 64 << 20
PIECE = 64 << 10
BLOCK = 4 * PIECE
SLOW = LinkSettings(
    read=Speed(RATE),
    write=Speed(RATE),
    piece_size=PIECE,
    shares=(8, 4, 1, 1),
)


def write(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def hammer(direction: LinkDirection, seed: int) -> None:
    """Push, poll, cancel and complete in an endless loop."""
    rng = random.Random(seed)
    queue = Queue(direction, now_ns=time.monotonic_ns())
    waiting: list[int] = []
    flying: list[int] = []
    number = 0
    while True:
        if len(waiting) < 4:
            number += 1
            tokens = rng.randrange(1, int(direction.handle.bucket.limit))
            now = time.monotonic_ns()
            waiting.append(queue.push(rng.randint(1, 4), tokens, number, now_ns=now))
        if rng.random() < 0.1:
            victim = waiting.pop(rng.randrange(len(waiting)))
            queue.cancel(victim)
        admitted = queue.poll(time.monotonic_ns())
        if admitted is not None:
            waiting.remove(admitted.handle)
            flying.append(admitted.handle)
        if flying and (admitted is None or rng.random() < 0.5):
            queue.complete(flying.pop(rng.randrange(len(flying))), time.monotonic_ns())
        if rng.random() < 0.1:
            queue.rest()


def child(direction: LinkDirection, seed: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            hammer(direction, seed)
        finally:
            os._exit(1)
    return pid


def kill(directory: str, name: str, capped: int, rounds: int, seed: int) -> None:
    """Three processes share a link, and are killed one after the other."""
    rng = random.Random(seed)
    settings = LinkSettings(read=Speed(1 << 30), write=Speed(1 << 30), capped=bool(capped))
    link = Link(name, settings, directory=Path(directory))
    direction = link.directions[Direction.READ]
    alive = [child(direction, number) for number in range(3)]
    for number in range(rounds):
        time.sleep(rng.random() * 0.01)
        victim = alive.pop(rng.randrange(len(alive)))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        alive.append(child(direction, 3 + number))
    time.sleep(0.02)
    used = int(direction.handle.used)
    for victim in alive:
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
    write(used=used, reaped=int(direction.handle.reaped), audited=int(direction.handle.audited))


def plan_of(pool: Pool, offset: int, size: int) -> tuple[np.ndarray, Plan]:
    memory = np.ones(size, np.uint8)
    fragments = memory.ctypes.data + np.arange(0, size, PIECE)
    sizes = np.full(size // PIECE, PIECE)
    offsets = np.array([offset], np.uint64)
    plan = plan_blocks(
        fragments.astype(np.uint64)[None, :], sizes, offsets, chunk_size=PIECE, owners=(memory,)
    )
    return memory, dataclasses.replace(
        plan, checksums=None
    )  # the bytes that are read were never written


def flood(directory: str, name: str, paths: str, kind: str, stripe: int) -> None:
    """Read 2 MiB again and again, in a class, until the input ends."""
    with Pool.open(paths.split(":")) as pool:
        first = -(-pool.geometry.data_offset // BLOCK) * BLOCK + stripe * (2 << 20)
        _, plan = plan_of(pool, first, 2 << 20)
        at = IoHandle(Link(name, SLOW, directory=Path(directory)))
        engine = CpuEngine(pool, 1, handle=at, read=TransferClass[kind])
        os.set_blocking(sys.stdin.fileno(), False)
        write(ready=True)
        while sys.stdin.buffer.raw.read(1) != b"":
            engine.scatter_read(plan).wait()
        at.close()


def onboard(directory: str, name: str, paths: str, count: int) -> None:
    """Read a block at a time, with pauses, and print how long each took."""
    with Pool.open(paths.split(":")) as pool:
        first = -(-pool.geometry.data_offset // BLOCK) * BLOCK
        _, plan = plan_of(pool, first, BLOCK)
        at = IoHandle(Link(name, SLOW, directory=Path(directory)))
        engine = CpuEngine(pool, 1, handle=at)
        took = []
        for _ in range(count):
            time.sleep(0.01)
            start = time.monotonic()
            engine.scatter_read(plan).wait()
            took.append(time.monotonic() - start)
        at.close()
        write(took=took)


def main() -> None:
    command, *arguments = sys.argv[1:]
    numbers = [int(text) if text.isdecimal() else text for text in arguments]
    {"kill": kill, "flood": flood, "onboard": onboard}[command](*numbers)  # type: ignore[operator]


if __name__ == "__main__":
    main()
