# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Two processes with a cache each share a link.

Gets have their share during endless puts, and continue when the other process is killed while it
copies.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.emulation import needs_a_cpu

from beluga import IndexServer, KVCache, Pool
from beluga.transfer import Direction, Link, TransferClass
from tests.kvcache.linked_process import COUNT, LENGTH, PIECE, RATE, SLOW, digests

PROGRAM = Path(__file__).with_name("linked_process.py")
ROOT = PROGRAM.parent.parent.parent
KINDS = (TransferClass.ONBOARD, TransferClass.OFFLOAD)
WAIT_S = 60

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def link(pool: Pool, server: IndexServer, shm: Path) -> Iterator[Link]:
    """Make a link, after the blocks for the gets were put without it."""
    with KVCache(pool, namespace="test") as cache:
        assert cache.put(digests(0), np.ones((COUNT, LENGTH), np.uint8)).stored == COUNT
    made = Link("host", SLOW, pool=pool, directory=shm)
    yield made
    made.close()


@pytest.fixture
def process(pool: Pool, link: Link, shm: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []
    paths = ":".join(str(device.path) for device in pool.devices)

    def start(what: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.kvcache.linked_process", str(shm), paths, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def moved(link: Link, seconds: float) -> tuple[list[int], float]:
    """Return the bytes of each class that move within ``seconds``."""
    before, start = [link.bytes_of(kind)[0] for kind in KINDS], time.monotonic()
    time.sleep(seconds)
    after, end = [link.bytes_of(kind)[0] for kind in KINDS], time.monotonic()
    return [b - a for a, b in zip(before, after, strict=True)], end - start


@pytest.mark.long
@needs_a_cpu("too few pieces pass in a second to compare their shares")
def test_gets_have_their_share_during_endless_puts(link: Link, process: Start) -> None:
    """The shares are 8 to 1 of a link that each of them could fill alone."""
    for what in ("get", "put"):
        process(what)
    seen, right = [], 0
    for _ in range(WAIT_S):  # a busy machine may starve either process; such seconds do not count
        (onboard, offload), took_s = moved(link, 1)
        assert onboard + offload <= 1.1 * RATE * took_s + 16 * PIECE
        seen.append((onboard, offload))
        right += offload > 0 and 3 < onboard / offload < 20
        if right == 5:
            break
    assert right == 5, f"not 8 to 1: {seen}"


def test_a_process_killed_during_a_copy_blocks_no_other(link: Link, process: Start) -> None:
    getter, putter = process("get"), process("put")
    direction = link.directions[Direction.READ]
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and not all(direction.bytes_of(kind) for kind in KINDS):
        time.sleep(0.01)
    putter.kill()
    putter.wait()
    most = 0.0
    for _ in range(10):
        (onboard, _), took_s = moved(link, 0.5)
        most = max(most, onboard / took_s)
        if most > 0.7 * RATE:
            break
    assert most > 0.7 * RATE  # nearly the whole link
    members = [member for member in direction.handle.members if member.owner != 0]
    assert [int(member.owner) & 0xFFFFFFFF for member in members] == [getter.pid]
    answer, _ = getter.communicate()
    assert answer == "0\n"  # no piece was unthrottled
