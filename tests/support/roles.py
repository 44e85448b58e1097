# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs the processes of processes.py: ``main()`` with ``ROLE DEVICE...`` as arguments.

A role prints "ready", then replies to each input line with one line until its input ends.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from support.blocks import BLOCK_WORDS, CHAIN, content, keys, states

from beluga.errors import BelugaError
from beluga.index import BlockState, Grant, IndexClient, IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, Server, stand_by
from beluga.transfer.engines.dsa.engine import DsaEngine


def lines() -> Iterator[str]:
    print("ready", flush=True)
    for line in sys.stdin:
        yield line.rstrip("\n")


def answer(text: object) -> None:
    print(text, flush=True)


def serve(pool: Pool) -> None:
    """An echo server; prints its CPU time (ns)."""
    with Server(pool) as server:
        server.handle(METHOD_USER, lambda request: request)
        for line in lines():
            answer(time.process_time_ns() if line == "cpu" else server.stat())


def serve_index(pool: Pool) -> None:
    """A server with the block index; prints the duration of its start in seconds."""
    start = time.perf_counter()
    with IndexServer(pool) as server:
        took = time.perf_counter() - start
        for line in lines():
            answer(took if line == "start" else server.index_stat())


def stand_by_index(pool: Pool) -> None:
    """A standby server with the block index, which prints its epoch after the takeover. Its first
    input line is the number of seconds without a heartbeat before it takes over.
    """
    server = IndexServer(pool)
    output = lines()
    stand_by(server, threading.Event(), silent_s=float(next(output)))
    answer(server.stat().epoch)
    for _ in output:
        answer(server.failure)
    server.stop()


def call(pool: Pool) -> None:
    """A client that makes a given number of calls, checks each, and prints the number of correct
    ones. "hold S" holds the GIL for S seconds.
    """
    with Client(pool) as client:
        for line in lines():
            verb, _, number = line.partition(" ")
            if verb == "hold":
                hold_interpreter(float(number))
                answer("held")
            elif verb == "fork":
                answer(fork_and_call(client))
            else:
                requests = [f"{client.stat().nonce:x} {i}".encode() for i in range(int(number))]
                answer(sum(client.call(METHOD_USER, r) == r for r in requests))


def hold_interpreter(seconds: float) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    sys.setswitchinterval(before)


def fork_and_call(client: Client) -> str:
    """Return the result of a call by a forked child's copy of the session."""
    import os

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.call(METHOD_USER, b"from the child")
            os.write(write, b"answered")
        except BelugaError as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    text = os.read(read, 100).decode()
    os.close(read)
    os.close(write)
    return text


def hold_blocks(pool: Pool) -> None:
    """A client of the index: reads JSON ``[verb, numbers]`` per line, and replies with JSON."""
    with Client(pool) as client:
        index = IndexClient(client)
        grants: dict[int, Grant] = {}
        for line in lines():
            verb, numbers = json.loads(line)
            if verb == "reserve":
                found = index.reserve(keys(numbers), length=1 << 20)
                grants.update(zip(numbers, found, strict=True))
                answer(json.dumps(states(found)))
            elif verb == "commit":
                answer(json.dumps(index.commit([grants[number] for number in numbers])))
            elif verb == "pin":
                answer(json.dumps(states(index.lookup(keys(numbers), pin=True).hits)))
            elif verb == "ping":
                client.ping()
                answer("[]")


def fetch(pool: Pool) -> None:
    """Gets chains, given as JSON numbers per line. Prints JSON ``[hits, wrong, mismatches]``."""
    target = np.empty((CHAIN, BLOCK_WORDS), dtype=np.uint64)
    with KVCache(pool, namespace="fetch", timeout_s=60) as cache:
        for line in lines():
            numbers = json.loads(line)
            found = cache.get(keys(numbers), target[: len(numbers)])
            wrong = sum(bool((target[i] != content(numbers[i])).any()) for i in range(found.hits))
            answer(json.dumps([found.hits, wrong, found.mismatches]))


def close_a_cache(pool: Pool) -> None:
    """A cache whose blocks an engine puts. Commands: ``put`` one block, ``close`` the cache; the
    process continues.
    """
    output = lines()
    with KVCache(pool, namespace="close", engine=DsaEngine(pool, "software")) as cache:
        next(output)
        answer(cache.put(keys([1]), [content(1)]).stored)
        next(output)
    answer("closed")
    next(output, "")


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
            rest = numbers[hits:]
            result = cache.put(keys(rest), [content(number) for number in rest])
            stored.update(rest[i] for i in np.flatnonzero(result.states == BlockState.GRANTED))
        answer(json.dumps({"stored": sorted(stored), "got": got, "wrong": wrong}))


def main() -> None:
    roles: dict[str, Callable[[Pool], None]] = {
        "serve": serve,
        "serve_index": serve_index,
        "stand_by_index": stand_by_index,
        "call": call,
        "hold_blocks": hold_blocks,
        "fetch": fetch,
        "close_a_cache": close_a_cache,
        "churn": churn,
    }
    try:
        with Pool.open(sys.argv[2:]) as pool:
            roles[sys.argv[1]](pool)
    except BelugaError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
