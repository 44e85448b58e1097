# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A client in a guest: ``python worker.py HOST DEVICE...``.

Prints "ready", then replies to each line with a line of JSON. Blocks are numbered; every fetched
byte is compared. The session reconnects to a new server; a call is retried only after a timeout: a
server that sees no heartbeat for 5 s treats the session as dead, and its client detects it by the
call's timeout. A guest in software emulation can be silent for that long.
"""

import itertools
import json
import queue
import random
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from support.blocks import BLOCK_WORDS, CHAIN, content, keys

from beluga.errors import CallTimeoutError, NoServerError
from beluga.index import BlockState
from beluga.kvcache import KVCache
from beluga.pool import Pool

BEGUN = 8  # rounds of churn
TIMEOUT_S = 60.0  # a call that finds no server waits for one
TRIES = 6


T = TypeVar("T")


class Worker:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._target = np.empty((CHAIN, BLOCK_WORDS), dtype=np.uint64)
        self._ran_out = 0

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        print("ready", flush=True)
        while line := self._lines.get():
            verb, *numbers = line.split()
            answer = getattr(self, verb)(*map(int, numbers))
            print(json.dumps(answer), flush=True)

    def put(self, first: int, end: int) -> dict[str, object]:
        """Store the blocks of these numbers. Returns those that the pool now has."""
        return {"there": [number for at in range(first, end, CHAIN)
                          for number in self._put(range(at, min(end, at + CHAIN)))]}  # fmt: skip

    def get(self, first: int, end: int) -> dict[str, object]:
        """Fetch blocks one by one. Returns the hits, the number of blocks with a wrong byte, and
        the number that the cache detected as changed and did not return.
        """
        there, wrong, changed = [], 0, 0
        for number in range(first, end):
            hits, bad, mismatches = self._get(range(number, number + 1))
            there += [number] * hits
            wrong, changed = wrong + bad, changed + mismatches
        return {"there": there, "wrong": wrong, "changed": changed}

    def churn(self, first: int, end: int, seed: int) -> dict[str, object]:
        """Report the start, and put and get chains of these numbers until the next line."""
        dice, there = random.Random(seed), set[int]()
        got = wrong = changed = 0
        for rounds in itertools.count():
            if rounds == BEGUN:
                print(json.dumps({"begun": rounds}), flush=True)
            if rounds >= BEGUN and not self._lines.empty():
                break
            start = dice.randrange(first, end, CHAIN)
            numbers = range(start, start + dice.randint(1, CHAIN))
            hits, bad, mismatches = self._get(numbers)
            there.update(self._put(numbers[hits:]))
            got, wrong, changed = got + hits, wrong + bad, changed + mismatches
        self._lines.get()
        return {"there": sorted(there), "got": got, "wrong": wrong, "changed": changed}

    def stat(self) -> dict[str, object]:
        """Return the server of this session, how often the session attached again, and how many
        calls timed out.
        """
        self._retried(self._cache.client.ping)
        stat = self._cache.client.stat()
        return {
            "epoch": stat.epoch,
            "reattached": stat.reattach_count,
            "ran_out": self._ran_out,
        }

    def _put(self, numbers: range) -> list[int]:
        blocks = [content(number) for number in numbers]
        result = self._retried(lambda: self._cache.put(keys(numbers), blocks))
        there = (BlockState.GRANTED, BlockState.HIT)
        return [numbers[i] for i, state in enumerate(result.states) if state in there]

    def _get(self, numbers: range) -> tuple[int, int, int]:
        target = self._target[: len(numbers)]
        result = self._retried(lambda: self._cache.get(keys(numbers), target))
        bad = sum(bool((self._target[i] != content(numbers[i])).any()) for i in range(result.hits))
        return result.hits, bad, result.mismatches

    def _retried(self, call: Callable[[], T]) -> T:
        for _ in range(TRIES - 1):
            try:
                return call()
            except (CallTimeoutError, NoServerError):
                self._ran_out += 1
        return call()

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("")


def main() -> None:
    host, *devices = sys.argv[1:]
    with (
        Pool.open(devices) as pool,
        KVCache(pool, namespace="hosts", host=int(host), timeout_s=TIMEOUT_S) as cache,
    ):
        Worker(cache).run()


if __name__ == "__main__":
    main()
