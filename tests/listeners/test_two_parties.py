# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One party attacks a bound of docs/operate/listeners.md, and another one goes on working.

Each row of ROWS has the attack, what an honest but busy party does in its place, the other party's
work, and how much memory the server may use for the attack. The server and the two parties are
processes. The slow test compares the rate of the work beside the attack with that beside the busy
party: the median ratio of interleaved pairs.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from attacked import Engine, Listener
from numpy.typing import NDArray
from support.blocks import eventually
from support.memory_tier import MemoryTier
from support.role import Process, lines, reply
from test_attacks import is_ended
from test_rules import BOUNDS

from beluga import Client, Handlers, IndexServer, KVCache, Pool
from beluga._ffi import lib
from beluga.errors import BelugaError
from beluga.gateway import Address, Limits, Service, Settings, read_engines
from beluga.rpc import messages
from beluga.tiers import TierService

MIB = 1 << 20
PAIRS, SLICE_S = 7, 1.0
RATIO_MIN = 0.8
BLOCKS = 2048  # of each party, in the tiers
BLOCK = np.zeros((16, 4096), np.uint8)


# ---- A pool with lower tiers


class SlowTier(MemoryTier):
    """A call to load or to remove blocks takes as long as for an object store."""

    def load(self, keys: NDArray[np.uint64]) -> Any:
        time.sleep(0.02)
        return super().load(keys)

    def remove(self, keys: NDArray[np.uint64]) -> int:
        time.sleep(0.02)
        return super().remove(keys)


def length(data: bytes) -> int:
    return len(data)


def serve(path: str, with_disk: bool) -> None:
    """Serve a pool over a store, also over a disk if wanted, and a function. Reply with the tiers'
    pending work. After the line "full" the tiers save no more blocks.
    """
    messages._HELD_MAX, messages._SHARE = 64 * MIB, 8 * MIB
    with Pool.open([path]) as pool:
        server = IndexServer(pool)
        server.register(Handlers(length))
        tiers = [SlowTier("disk")] * with_disk + [SlowTier("store", remote=True)]
        service = TierService(server, pool, tiers, wait=True)
        server.start()
        service.start()
        for line in lines():
            for tier in tiers:
                tier.full = line == "full"
            stat = server.lower_stat()
            reply(stat.dirty_count + stat.wanted_count + stat.removal_count)
        service.stop()
        server.stop()


class Session:
    """A party's session with the pool. No other party uses its keys."""

    def __init__(self, path: str, party: int, timeout_s: float) -> None:
        self._pool = Pool.open([path])
        self.client = Client(self._pool, timeout_s=timeout_s)
        self.cache = KVCache(self.client, namespace="test")
        self.numbers = itertools.count(time.monotonic_ns())  # never used before
        self.stored = [(party << 100 | number).to_bytes(16, "little") for number in range(BLOCKS)]
        self._at = itertools.cycle(range(0, BLOCKS, 16))
        self.out = np.empty_like(BLOCK)

    def new(self, count: int) -> list[bytes]:
        """Return new digests."""
        return [next(self.numbers).to_bytes(16, "little") for _ in range(count)]

    def next(self) -> list[bytes]:
        """Return digests of blocks that a tier has."""
        first = next(self._at)
        return self.stored[first : first + 16]

    def store(self) -> None:
        for _ in range(0, BLOCKS, 16):
            digests = self.next()
            while self.cache.put(digests, BLOCK).refused:  # until a tier has others
                time.sleep(0.001)

    def close(self) -> None:
        self.client.close()
        self._pool.close()


def put(session: Session) -> list[bytes]:
    digests = session.new(16)
    session.cache.put(digests, BLOCK).raise_for_refused()
    return digests


def call(session: Session) -> bool:
    return session.client.call("length", bytes(MIB)) == MIB


def pin(session: Session) -> bool:
    return session.cache.release(session.cache.pin(put(session))) == 16


def hint(session: Session) -> bool:
    return session.cache.hint(put(session), priority="low").given == 16


def load(session: Session) -> bool:
    return session.cache.get(session.next(), session.out).hits == 16


def load_many(session: Session) -> bool:
    """Request the blocks of 8 prompts at a time, and wait for the first."""
    prompts = [session.next() for _ in range(8)]
    for digests in prompts:
        session.cache.onboard(digests)
    return session.cache.get(prompts[0], session.out).hits == 16


def remove(session: Session) -> bool:
    return session.cache.remove(put(session)) == 16


def never_end(session: Session) -> bool:
    """Send most of a message, as large as there is room for a session."""
    part, number = bytes(16 << 10), next(session.numbers) % (1 << 32)
    for at in range(0, 30 * MIB, len(part)):
        head = messages._HEAD.pack(messages.SEND, number, at, 32 * MIB)
        session.client.call(int(lib.BL_METHOD_FUNCTION), head + part)
    return True


def pin_all(session: Session) -> bool:
    return bool(session.cache.pin(put(session)))


def hint_all(session: Session) -> bool:
    return bool(session.cache.hint(put(session), priority="high", pin=True).given)


def request_many(session: Session) -> bool:
    return bool(session.cache.onboard(session.new(16384)))


def request_often(session: Session) -> bool:
    return bool(session.cache.onboard(session.new(1)))


def remove_many(session: Session) -> bool:
    return bool(session.cache.remove(session.new(16384)))


# ---- The gateway


SLOTS, QUEUED = 4, 64  # of a gateway with a slow engine: running and waiting requests


def route() -> None:
    """Serve a gateway with a slow engine. Reply with its address."""

    async def serve_requests(url: str) -> None:
        limits = Limits(inflight_max=SLOTS, queued_max=QUEUED, health_interval_s=0.1)
        settings = Settings(
            engines=read_engines([url]),
            policy="round-robin",
            listen=Address("127.0.0.1", 0),
            admin=None,
            limits=limits,
        )
        async with Service(settings) as service:
            await asyncio.to_thread(reply_to_lines, "{}:{}".format(*service.address))

    with Engine(pause_s=0.02).running() as engine:
        asyncio.run(serve_requests(engine.url))


def reply_to_lines(text: str) -> None:
    for _ in lines():
        reply(text)


class Caller:
    """A client of the gateway with its own address."""

    def __init__(self, address: str, party: int, timeout_s: float) -> None:
        host, _, port = address.partition(":")
        self._source, self._address = (f"127.0.0.{1 + party}", 0), (host, int(port))
        self._timeout_s = max(timeout_s, 1)
        self._kept = http.client.HTTPConnection(
            *self._address, timeout=self._timeout_s, source_address=self._source
        )
        self.held: list[socket.socket] = []
        self.posting: list[http.client.HTTPConnection] = []

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, self._timeout_s, self._source)

    def post(self, prompt: str) -> int:
        """Send a completion. Returns its status."""
        try:
            self._send(self._kept, prompt)
            with self._kept.getresponse() as response:
                response.read()
                return response.status
        except (OSError, http.client.HTTPException):
            self._kept.close()
            return 0

    def _send(self, connection: http.client.HTTPConnection, prompt: str, key: str = "") -> None:
        body = json.dumps({"model": "m", "prompt": prompt})
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        connection.request("POST", "/v1/completions", body, headers)

    def keep_posting(self, count: int) -> bool:
        """Have that many requests, each of its own API key, and wait until one has ended."""
        while len(self.posting) < count:
            self.posting.append(
                http.client.HTTPConnection(
                    *self._address, timeout=self._timeout_s, source_address=self._source
                )
            )
            self._send(self.posting[-1], "a", str(len(self.posting)))
        sockets = [each.sock for each in self.posting]
        readable, _, _ = select.select(sockets, [], [], self._timeout_s)
        for number, each in enumerate(self.posting):
            if each.sock in readable:
                with each.getresponse() as response:
                    response.read()
                self._send(each, "a", str(number))
        return True

    def close(self) -> None:
        self._kept.close()
        for each in (*self.held, *self.posting):
            each.close()


def complete(caller: Caller) -> bool:
    return caller.post("a") == 200


def complete_long(caller: Caller) -> bool:
    return caller.post("a" * MIB) == 200


def hold(caller: Caller, sent: bytes) -> bool:
    """Have many connections that have sent this and wait."""
    ended = [each for each in caller.held if is_ended(each)]
    for each in ended:
        caller.held.remove(each)
        each.close()
    time.sleep(0.002)
    if len(caller.held) < 150:
        caller.held.append(caller.connect())
        caller.held[-1].sendall(sent)
    return True


def fill_queue(caller: Caller) -> bool:
    return caller.keep_posting(SLOTS + QUEUED)


def keep_slots_busy(caller: Caller) -> bool:
    return caller.keep_posting(2 * SLOTS)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def hold_connections(caller: Caller) -> bool:
    return hold(caller, b"")


def hold_heads(caller: Caller) -> bool:
    return hold(caller, HEAD + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 60_000) for n in range(15)))


def hold_bodies(caller: Caller) -> bool:
    return hold(caller, HEAD + b"Content-Length: 50000000\r\n\r\n" + b"a" * 4 * MIB)


# ---- The table


Party = Session | Caller
Step = Callable[[Any], bool]  # whether it did all that it should


class Row(NamedTuple):
    bound: str
    attack: Step
    busy: Step
    work: Step
    steps: int  # of the attack, until it is at its bound
    grows: int  # bytes
    blocks: int = 0  # lines of the pool's table; 0: the gateway is attacked
    disk: bool = False
    slow: bool = False  # the gateway has a slow engine

    @property
    def name(self) -> str:
        return f"{self.attack.__name__}{'-disk' * self.disk}"


REMOVALS = "removals that tiers have not executed"
ROWS = (
    Row("open connections for clients", hold_connections, complete, complete, 200, 32 * MIB),
    # By bytes: 0.6 to 0.9 ns of the gateway's CPU for one of a head, 12 to 19 for one of a prompt.
    # Beside tiny requests the sender's own CPU decides on a machine with two of them.
    Row("unfinished heads", hold_heads, complete_long, complete, 200, 128 * MIB),
    Row("bodies", hold_bodies, complete, complete, 200, 256 * MIB),
    Row("waiting requests", fill_queue, keep_slots_busy, complete, 20, 32 * MIB, slow=True),
    Row("incomplete messages", never_end, call, call, 1, 80 * MIB, 4096),
    Row("pinned blocks", pin_all, pin, pin, 1100, 8 * MIB, 1 << 16),
    Row("hints", hint_all, hint, hint, 1100, 8 * MIB, 1 << 16),
    Row("requested blocks of lower tiers", request_many, load_many, load, 3, 16 * MIB, 1024),
    Row("requested blocks of lower tiers", request_often, load_many, load, 40_000, 16 * MIB, 1024),
    Row(REMOVALS, remove_many, remove, remove, 1, 16 * MIB, 1 << 16),
    Row(REMOVALS, remove_many, remove, remove, 1, 16 * MIB, 1 << 16, disk=True),
)

OLDEST = "the oldest entry goes: one step for each request, whoever has filled the table"
ONE = "of one deployment"
OTHER_BOUNDS = {
    "engines of the last responses": OLDEST,
    "clients that an engine refused": OLDEST,
    "salted blocks of an engine": OLDEST,
    "kinds of logged messages": OLDEST,
    "token ids of blocks": OLDEST,
    "tasks in a pool's queues": ONE,
    "tasks in a prefill queue": ONE,
    "events that a replay can repeat": OLDEST,
    "events that a router has not read": "test_attacks.py: a flood of replays delays no event",
    "replays": "test_attacks.py: a flood of replays delays no event",
    "caches of a connector's session": OLDEST,
    "namespaces of LMCache's adapter": OLDEST,
    "files of namespaces": "later ones are not written",
    "sessions with hints, in vLLM's connector": OLDEST,
    "blocks being saved, in vLLM's connector": OLDEST,
    "adapters, in vLLM's connector": ONE,
    "token ids that the server has not read, in vLLM's connector": ONE,
    "hints that wait, in vLLM's connector": ONE,
    "deletions that LMCache's adapter has not executed": ONE,
    "calls of a disk or store that hang": ONE,
}


def test_every_bound_is_attacked_or_has_a_reason() -> None:
    assert {row.bound for row in ROWS} | set(OTHER_BOUNDS) == set(BOUNDS)


# ---- The parties


class Repeated:
    """A step that a party repeats in a thread of its own."""

    def __init__(self, party: Party, step: Step) -> None:
        self._party, self._step = party, step
        self._ending, self.tries, self.done = threading.Event(), 0, 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(BelugaError, OSError):
                self.done += self._step(self._party)
            self.tries += 1

    def end(self) -> None:
        self._ending.set()
        self._thread.join()
        self._party.close()


def party(target: str, number: int, row: int) -> None:
    """Begin to repeat the step of each line, until the line "rest". "tries" and "done" are how
    often it was tried, and how often it did all that it should.
    """
    made: Callable[..., Party] = Session if ROWS[row].blocks else Caller
    running: Repeated | None = None
    for line in lines():
        if running is None:
            timeout_s = 0.1 if line == "attack" else 10
            running = Repeated(made(target, number, timeout_s), getattr(ROWS[row], line))
            reply("")
        elif line == "rest":
            running.end()
            running = None
            reply("")
        else:
            reply(getattr(running, line))


def prepare(path: str, number: int) -> None:
    with contextlib.closing(Session(path, number, 10)) as session:
        session.store()
    for _ in lines():
        pass


class Scene(NamedTuple):
    row: Row
    pid: int  # of the server
    other: Process
    honest: Process

    def own_bytes(self) -> int:
        """Return the server's memory without what it shares with others, as the pool is."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) << 10

    def begin(self, other: str) -> None:
        """Let the other party begin, and wait until an attack is at its bound."""
        self.other.request(other)
        steps = self.row.steps if other == "attack" else 1
        assert eventually(lambda: int(self.other.request("tries")) >= steps)

    def rate(self, other: str) -> float:
        """Return how many steps a second the honest party makes beside the other one."""
        self.begin(other)
        before, started = int(self.honest.request("done")), time.monotonic()
        time.sleep(SLICE_S)
        done = int(self.honest.request("done")) - before
        rate = done / (time.monotonic() - started)
        self.other.request("rest")
        return rate


@pytest.fixture
def scene(shm: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    row = ROWS[request.param]
    with ExitStack() as stack:

        def start(role: Callable[..., None], *arguments: object) -> Process:
            return stack.enter_context(Process(role, *arguments))

        if row.blocks:
            target: object = shm / "pool"
            size = row.blocks * 4096 + 128 * MIB
            Pool.create(
                [shm / "pool"], device_size=size, sparse=True, max_blocks=row.blocks
            ).close()
            server = start(serve, target, row.disk)
            for number in (1, 2) if row.work is load else ():
                start(prepare, target, number)
            pid = server.pid
            for line in ("", "full"):
                assert eventually(lambda line=line: int(server.request(line)) == 0)
        elif row.slow:
            server = start(route)
            target, pid = server.request(""), server.pid
            with contextlib.closing(Caller(target, 0, 1)) as caller:
                assert eventually(lambda: complete(caller))
        else:
            clients: Listener = request.getfixturevalue("served").http["clients"]
            assert not isinstance(clients.address, Path)
            target = "{}:{}".format(*clients.address)
            pid = clients.process.pid
        other, honest = (start(party, target, number, request.param) for number in (1, 2))
        yield Scene(row, pid, other, honest)


BY_ROW = pytest.mark.parametrize(
    ("scene", "row"), list(enumerate(ROWS)), indirect=["scene"], ids=[row.name for row in ROWS]
)


@pytest.mark.slow
@BY_ROW
def test_an_attack_slows_another_party_by_a_fifth_at_most(scene: Scene, row: Row) -> None:
    scene.honest.request("work")
    pairs = [(scene.rate("busy"), scene.rate("attack")) for _ in range(PAIRS)]
    ratio = statistics.median(attacked / busy for busy, attacked in pairs)
    print(f"\n{row.name}: {ratio:.2f}", *(f"{busy:.0f}:{attacked:.0f}" for busy, attacked in pairs))
    assert ratio >= RATIO_MIN


@pytest.mark.long
@BY_ROW
def test_an_attack_takes_bounded_memory(scene: Scene, row: Row) -> None:
    before = peak = scene.own_bytes()
    scene.begin("attack")
    scene.honest.request("work")
    while int(scene.honest.request("done")) < 10:
        peak = max(peak, scene.own_bytes())
    grown = peak - before
    scene.other.request("rest")
    print(f"\n{row.name}: {grown / MIB:.1f} MiB")
    assert grown < row.grows
