# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The processes of the kill loop: a server of the block index, or a client that uses all of it.

Each reads one line of JSON at a time and writes one in reply. Every fetched byte is compared with
the content for its key; a difference is reported as ``error``, which ends the loop.
"""

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.blocks import keys

from beluga._ffi import ffi, lib
from beluga.errors import NoServerError, RpcError, SessionLostError
from beluga.index import (
    LOWER_NOTE,
    BlockState,
    IndexClient,
    IndexServer,
    LowerWork,
    Removal,
    Work,
    chain_names,
)
from beluga.kvcache import KVCache, PutResult
from beluga.pool import Pool
from beluga.rpc import Client as RpcClient
from beluga.rpc import Handlers

handlers = Handlers()


@handlers.add
def mirrored(data: bytes) -> bytes:
    return data[::-1]


Message = dict[str, Any]
Talk = Callable[[Message | None], Message]  # replies, then reads the next order

NUMBERS = 160  # blocks that the clients of a pool share
PERMANENT = 24  # the first ones are never removed
CHAIN = 6
WORDS = (384, 5120, 80_000)  # of 8 bytes: one checksum, three, many
PAGE_WORDS = 512
OWN = 1000  # from here on each block is longer than a stripe and has its own extent
SLOTS_MAX = 4
EVERY = (*range(NUMBERS), *range(OWN, OWN + 2 * SLOTS_MAX))
SIZES = (0, 8, 300, 3000)  # bytes of a handler's call: within a line, and in the bulk area
CALL_S = 60.0  # a longer call counts as hung
REMOVER_S = 0.005  # interval of the remover
HASTE_S = 0.02  # shorter than the time that a server is stopped


def words_of(number: int) -> int:
    """Return the length of a block."""
    return WORDS[number % len(WORDS)] if number < OWN else (number - OWN + 520) * PAGE_WORDS


def content(number: int) -> NDArray[np.uint64]:
    """Return the bytes of a block: no word occurs in two blocks."""
    return np.arange(words_of(number), dtype=np.uint64) * np.uint64(3) + np.uint64(number << 32)


def is_named(number: int) -> bool:
    """Return whether a block is put with a name."""
    return number % 2 == 0


def names(numbers: list[int]) -> NDArray[np.void]:
    """Return the blocks' names; the others' rows are zeros."""
    named = chain_names(numbers, [~number for number in numbers], block_tokens=16, space=7)
    named[[not is_named(number) for number in numbers]] = np.zeros(1, named.dtype)
    return named


def arm(message: Message) -> None:
    """Execute ``arm``: the crash point (or None), the passage, whether to stop there, and the words
    of its line that reach memory.
    """
    name, passage, stop, words = message["arm"]
    if lib.bl_crash_arm(name.encode() if name else ffi.NULL, passage, stop, words) < 0:
        raise ValueError(f"no crash point {name}")


def serve(talk: Talk, paths: list[Path], first: Message) -> None:
    """Run a server: ``stat``, ``arm``, ``stop``."""
    if "arm" in first:
        arm(first)
    with Pool.open(paths) as pool:
        server = IndexServer(pool, shares={"killloop": 0.4})
        # One server has another tier, which its successors abandon.
        brings = first.get("brings_tier", False)
        if not brings:
            server.give_up_tier("another")
        names = ["another" if brings else "usual"]
        token = server.attach_lower(0, wait=False, unknown=2, names=names)
        server.register(handlers, threads=2)
        server.start()
        remover = Remover(server, pool, token)
        message = talk({"epoch": server.stat().epoch})
        while message:
            answer: Message = {}
            if "arm" in message:
                arm(message)
            elif "stop" in message:
                remover.stop()
                server.stop()
            else:
                check_budgets(server)
                counters = dataclasses.asdict(server.index_stat())
                answer = counters | dataclasses.asdict(server.stat())
                answer["failure"] = str(server.failure or "")
            message = talk(answer)


def check_budgets(server: IndexServer) -> None:
    """Compare what hints favor with the budget of each share."""
    for share in server.shares():
        if share.hinted_bytes > share.hint_bytes:
            raise AssertionError(f"hints favor {share.hinted_bytes} bytes of {share}")


class Remover:
    """A lower tier without blocks that executes removals, some of them only at the second attempt,
    so that successors find tombstones.
    """

    def __init__(self, server: IndexServer, pool: Pool, token: int) -> None:
        self._server = server
        self._client = RpcClient(pool)
        self._work = LowerWork(self._client, token)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        with contextlib.suppress(RpcError):  # another server has the pool
            while not self._ending.is_set():
                self._server.wait_lower(1 << Work.REMOVE | 1 << Work.RETRY, REMOVER_S)
                self._execute(self._work.take(Work.RETRY, 100, tier=1), Removal.DONE)
                time.sleep(REMOVER_S)
                self._execute(self._work.take(Work.REMOVE, 100), Removal.FAILED)

    def _execute(self, records: NDArray[np.void], odd: Removal) -> None:
        notes = np.zeros(len(records), LOWER_NOTE)
        for field in ("key", "generation", "block"):
            notes[field] = records[field]
        notes["removal"] = np.where(records["key"][:, 0] % 2, odd, Removal.DONE)
        self._work.report(notes)


class Client:
    """A client. Orders: ``tour`` does everything once, ``churn`` does random steps, ``audit`` reads
    all blocks.
    """

    def __init__(self, pool: Pool, slot: int) -> None:
        self._pool = pool
        self._own_removed = False  # the blocks that only this client puts were removed
        self._own = OWN + 2 * slot  # two numbers that no other client uses
        self._cache = self._attach()
        self._stored: set[int] = set()
        self._checked = 0

    def answer(self, message: Message) -> Message:
        """Execute the order."""
        if "arm" in message:
            arm(message)
            return {}
        if "ping" in message:
            self._cache.client.ping()
            return {}
        if "audit" in message:
            return {"there": self._audit()}
        if "clear" in message:
            self._cache.remove(keys(EVERY))
            return dataclasses.asdict(self._cache.stat())
        if "hasty" in message:
            self._attach_in_vain()
        self._stored, self._checked = set(), 0
        dice = random.Random(message["seed"])
        steps = [self._store, self._fetch, self._doom, self._give_up, self._own_class, self._call]
        steps.append(self._hint)
        if "churn" in message:
            steps = dice.choices([*steps, self._attach_anew], k=message["churn"])
        else:
            steps = [*steps, self._store, self._attach_anew, self._fetch]
        for step in steps:
            try:
                step(dice)
            except SessionLostError:  # legal: this batch was sent to two servers
                continue
        return {"stored": sorted(self._stored), "checked": self._checked}

    def close(self) -> None:
        self._cache.close()

    def _attach(self) -> KVCache:
        end = time.monotonic() + CALL_S
        while True:
            try:
                return KVCache(self._pool, namespace="killloop", timeout_s=CALL_S, onboard=False)
            except NoServerError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.001)

    def _attach_in_vain(self) -> None:
        """Try to attach while the server is stopped: the attempt times out and is withdrawn."""
        with contextlib.suppress(RpcError):
            KVCache(self._pool, namespace="killloop", timeout_s=HASTE_S).close()

    def _attach_anew(self, _: random.Random) -> None:
        self._cache.close()
        self._cache = self._attach()

    def _chain(self, dice: random.Random) -> list[int]:
        first, size = dice.randrange(NUMBERS), dice.randint(2, CHAIN)
        return [(first + 3 * i) % NUMBERS for i in range(size)]

    def _put(self, numbers: list[int]) -> PutResult:
        blocks = [content(number) for number in numbers]
        return self._cache.put(keys(numbers), blocks, names=names(numbers))

    def _store(self, dice: random.Random) -> None:
        numbers = self._chain(dice)
        result = self._put(numbers)
        granted = np.flatnonzero(result.states == BlockState.GRANTED)
        self._stored.update(numbers[i] for i in granted)

    def _fetch(self, dice: random.Random) -> None:
        numbers = self._chain(dice)
        self._right(numbers)
        if self._stored:
            self._right([dice.choice(sorted(self._stored))])

    def _right(self, numbers: list[int]) -> int:
        """Return how many leading blocks are present; each must be intact."""
        targets = [np.zeros(words_of(number), dtype=np.uint64) for number in numbers]
        hits = self._cache.get(keys(numbers), targets).hits
        for number, target in zip(numbers[:hits], targets, strict=False):
            if not np.array_equal(target, content(number)):
                raise AssertionError(f"block {number}: bytes that were never stored under its key")
        self._checked += hits
        return hits

    def _doom(self, dice: random.Random) -> None:
        """Remove a block while it is pinned, and one that is not."""
        index = IndexClient(self._cache.client)
        number = dice.randrange(PERMANENT, NUMBERS)
        self._put([number])
        hits = index.lookup(keys([number]), pin=True).hits
        index.remove(keys([number, dice.randrange(PERMANENT, NUMBERS)]))
        index.release(hits)
        self._stored -= {number}

    def _give_up(self, dice: random.Random) -> None:
        """Reserve blocks, write none, and abort the grants."""
        index = IndexClient(self._cache.client)
        numbers = [number for number in self._chain(dice) if number >= PERMANENT]
        grants = index.reserve(keys(numbers), length=WORDS[0] * 8)
        index.abort([grant for grant in grants if grant.state == BlockState.GRANTED])

    def _own_class(self, _: random.Random) -> None:
        """Open extents and empty them; removed blocks are absent, whichever server serves."""
        numbers = [self._own, self._own + 1]
        if self._own_removed and (back := [number for number in numbers if self._right([number])]):
            raise AssertionError(f"blocks {back} were removed and are there")
        self._own_removed = False
        self._put(numbers)
        self._right(numbers)
        self._cache.remove(keys(numbers))
        self._own_removed = True

    def _hint(self, dice: random.Random) -> None:
        """Hint blocks that others evict, remove and pin; some hints end at once."""
        numbers, priority = self._chain(dice), dice.choice(["low", "normal", "high"])
        pin = priority != "low" and dice.random() < 0.5
        ttl = dice.choice([None, 0.001, 60.0])
        result = self._cache.hint(keys(numbers), priority=priority, pin=pin, ttl=ttl)
        if result.given + result.refused + result.absent != len(numbers):
            raise AssertionError(f"{result} for {len(numbers)} hints")

    def _call(self, dice: random.Random) -> None:
        """Call a handler; its thread may die with the server. The reply must be that of this
        call.
        """
        sent = dice.randbytes(dice.choice(SIZES))
        got = self._cache.client.call("mirrored", sent, returns=bytes, timeout_s=CALL_S)
        if got != sent[::-1]:
            raise AssertionError(f"a handler's answer of {len(got)} bytes belongs to another call")

    def _audit(self) -> list[int]:
        return [number for number in EVERY if self._right([number])]


def use(talk: Talk, paths: list[Path], first: Message) -> None:
    """Run a client until it is ordered to close."""
    if "arm" in first:
        arm(first)
    with Pool.open(paths) as pool:
        client = Client(pool, first["slot"])
        message = talk({})
        while "close" not in message:
            message = talk(client.answer(message))
        client.close()
        talk({})
