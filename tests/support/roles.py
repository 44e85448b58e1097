# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What processes of several test files do over a pool: functions for ``role.Process``, whose
argument is the list of its devices. Each replies to each input line with one line.
"""

import functools
import json
import queue
import random
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from support.blocks import BLOCK_WORDS, CHAIN, content, keys, states
from support.role import lines, reply
from support.soft_dsa import soft_engine

from beluga.index import BlockState, Grant, IndexClient, IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, Server, stand_by


def over_pool(function: Callable[[Pool], None]) -> Callable[[list[str]], None]:
    """Return the role that opens a pool on its devices first."""

    @functools.wraps(function)
    def play(paths: list[str]) -> None:
        with Pool.open(paths) as pool:
            function(pool)

    return play


@over_pool
def serve(pool: Pool) -> None:
    """An echo server; prints its CPU time (ns)."""
    with Server(pool) as server:
        server.handle(METHOD_USER, lambda request: request)
        for line in lines():
            reply(time.process_time_ns() if line == "cpu" else server.stat())


@over_pool
def serve_index(pool: Pool) -> None:
    """A server with the block index; prints the duration of its start in seconds."""
    start = time.perf_counter()
    with IndexServer(pool) as server:
        took = time.perf_counter() - start
        for line in lines():
            reply(took if line == "start" else server.index_stat())


@over_pool
def stand_by_index(pool: Pool) -> None:
    """A standby server with the block index, which prints its epoch after the takeover. Its first
    input line is the number of seconds without a heartbeat before it takes over.
    """
    server = IndexServer(pool)
    output = lines()
    stand_by(server, threading.Event(), silent_s=float(next(output)))
    reply(server.stat().epoch)
    for _ in output:
        reply(server.failure)
    server.stop()


@over_pool
def call(pool: Pool) -> None:
    """A client that makes a given number of calls, checks each, and prints the number of correct
    ones. "hold S" holds the GIL for S seconds.
    """
    with Client(pool) as client:
        for line in lines():
            verb, _, number = line.partition(" ")
            if verb == "hold":
                hold_interpreter(float(number))
                reply("held")
            else:
                requests = [f"{client.stat().nonce:x} {i}".encode() for i in range(int(number))]
                reply(sum(client.call(METHOD_USER, r) == r for r in requests))


def hold_interpreter(seconds: float) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    sys.setswitchinterval(before)


@over_pool
def hold_blocks(pool: Pool) -> None:
    """A client of the index: reads JSON ``[verb, numbers]`` per line, and replies with JSON."""
    with Client(pool) as client:
        index = IndexClient(client)
        grants: dict[int, Grant] = {}
        for line in lines():
            verb, numbers = json.loads(line)
            if verb == "reserve":
                reserved = index.reserve(keys(numbers), length=1 << 20)
                grants.update(zip(numbers, reserved, strict=True))
                reply(json.dumps(states(reserved)))
            elif verb == "commit":
                reply(json.dumps(index.commit([grants[number] for number in numbers])))
            elif verb == "pin":
                reply(json.dumps(states(index.lookup(keys(numbers), pin=True).hits)))
            elif verb == "ping":
                client.ping()
                reply("[]")


@over_pool
def fetch(pool: Pool) -> None:
    """Gets chains, given as JSON numbers per line. Prints JSON ``[hits, wrong, mismatches]``."""
    target = np.empty((CHAIN, BLOCK_WORDS), dtype=np.uint64)
    with KVCache(pool, namespace="fetch", timeout_s=60) as cache:
        for line in lines():
            numbers = json.loads(line)
            result = cache.get(keys(numbers), target[: len(numbers)])
            wrong = sum(bool((target[i] != content(numbers[i])).any()) for i in range(result.hits))
            reply(json.dumps([result.hits, wrong, result.mismatches]))


@over_pool
def close_a_cache(pool: Pool) -> None:
    """A cache whose blocks an engine puts. Commands: ``put`` one block, ``close`` the cache; the
    process continues.
    """
    output = lines()
    with KVCache(pool, namespace="close", engine=soft_engine(pool)) as cache:
        next(output)
        reply(cache.put(keys([1]), [content(1)]).stored)
        next(output)
    reply("closed")
    next(output, "")


@over_pool
def churn(pool: Pool) -> None:
    """Puts and gets chains of blocks until its input ends, and checks every byte that it gets.

    ``go SEED CHAINS`` starts; the reply to the next line is JSON: blocks ``stored`` (their
    numbers), how many were ``got``, and how many were ``wrong``.
    """
    mailbox: queue.Queue[str] = queue.Queue()
    output = lines()
    _, seed, chain_count = next(output).split()
    threading.Thread(target=lambda: [mailbox.put(line) for line in output], daemon=True).start()
    dice, target = random.Random(int(seed)), np.empty((CHAIN, BLOCK_WORDS), dtype=np.uint64)
    stored: set[int] = set()
    got = wrong = 0
    with KVCache(pool, namespace="churn", timeout_s=20) as cache:
        while mailbox.empty():
            first = dice.randrange(int(chain_count)) * CHAIN
            numbers = range(first, first + dice.randint(1, CHAIN))
            hits = cache.get(keys(numbers), target[: len(numbers)]).hits
            got += hits
            wrong += sum(bool((target[i] != content(numbers[i])).any()) for i in range(hits))
            missing = numbers[hits:]
            result = cache.put(keys(missing), [content(number) for number in missing])
            stored.update(missing[i] for i in np.flatnonzero(result.states == BlockState.GRANTED))
        reply(json.dumps({"stored": sorted(stored), "got": got, "wrong": wrong}))
