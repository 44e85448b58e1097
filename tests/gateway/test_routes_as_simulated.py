# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway chooses as the simulator does for the same trace and the same events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import numpy as np
from routed import ANY_PORT

from beluga.errors import EventError
from beluga.gateway import EngineSpec, Limits, Service, Settings
from beluga.gateway.attempts import Attempts
from beluga.gateway.engine import Health
from beluga.gateway.parsed_request import ParsedRequest
from beluga.router import (
    BlockHasher,
    Choice,
    Query,
    Removed,
    RouterEvent,
    Stored,
    Tier,
    Worker,
)
from beluga.simulate import Options, Trace, TraceEntry, make_trace
from beluga.simulate.cluster import Caches, Cluster

BLOCK = 512
GIB = 1 << 30
WORKERS = 3


def chats(seed: int) -> Trace:
    """Create growing chats that arrive faster than they are served."""
    random, prompts, fresh = Random(seed), [], 1
    for chat in range(40):
        blocks = [0]
        for turn in range(3):
            added = random.randint(1, 6)
            blocks = [*blocks, *range(fresh, fresh + added)]
            fresh += added
            size = len(blocks) * BLOCK + random.randint(1, BLOCK - 1)
            prompts.append(TraceEntry(chat * 0.5 + turn * 9.5, size, random.randint(1, 99), blocks))
    return make_trace("chats", BLOCK, prompts, 1.0)


class Clock:
    """Replaces the module ``time``."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = time = monotonic


class Recorded(Cluster):
    """A simulation that records the events and requests of its router, and its choices."""

    def __init__(self, trace: Trace, policy: str) -> None:
        options = Options(workers=WORKERS, pool=24 * GIB, hbm=6 * GIB)
        self.steps: list[tuple[str, Any]] = []
        super().__init__(trace, options, policy=policy, memory="pool")
        tracker, route = self.router.tracker, self.router.route
        for name in ("prefill_done", "free", "publish"):
            setattr(tracker, name, self._noting(name, getattr(tracker, name)))

        def routed(request: int, query: Query, *, now: float) -> Choice:
            matches = self._matches(query)
            choice = route(request, query, now=now)
            self.steps.append(("route", (request, query, matches, choice.worker, now)))
            return choice

        self.router.route = routed  # type: ignore[method-assign,assignment]

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            self.steps.append((name, arguments))
            return call(*arguments)

        return noted


class Replayed:
    """A gateway that gets the same events, and the same requests from a client."""

    def __init__(self, service: Service, clock: Clock, events_clock: Clock) -> None:
        self.service, self.clock, self.events_clock = service, clock, events_clock
        self.hasher = BlockHasher(block_size=BLOCK)
        self.names: dict[int, int] = {}  # the gateway's loads, by the trace's request

    def prompt(self, query: Query) -> list[int]:
        """Return a prompt's tokens: each of the trace's blocks has its own."""
        whole = [token for block in query.hashes for token in [block % 2**32] * BLOCK]
        return (whole + [2**32 - 1] * query.isl)[: query.isl]

    def announce(self, tokens: list[int], caches: Caches) -> None:
        """Send the events after which the index has the hits of the simulator."""
        local = self.hasher.local(tokens)
        names = self.hasher.sequence(local)
        holders = [(Worker(n + 1), Tier.DEVICE, int(caches.device[n])) for n in range(WORKERS)]
        holders.append((Worker(1), Tier.SHARED, int(caches.far[0])))
        index = self.service.index().indexer
        for worker, tier, lead in holders:
            if lead < len(names):
                with contextlib.suppress(EventError):  # some are not there
                    index.apply(RouterEvent(worker, Removed(names[lead:]), tier=tier))
            if lead:
                index.apply(RouterEvent(worker, Stored(names[:lead], local[:lead]), tier=tier))

    def route(self, request: int, query: Query, caches: Caches, now: float) -> Worker:
        self.clock.now = now
        self.events_clock.now += 1e6  # the predicted blocks have been announced long before
        tokens = self.prompt(query)
        if self.service._router.policy.uses_overlap:
            self.announce(tokens, caches)
        ids = np.asarray(tokens, np.uint32)
        parsed = ParsedRequest("/v1/completions", b"", "m", query.isl, ids)
        placed = self.service._director._try(
            parsed, self.service._cache.query_of(parsed), Attempts()
        )
        assert placed is not None
        self.names[request] = placed._name
        return Worker(placed.choice.worker.worker_id - 1)


POLICIES = (
    *("linear:shared_credit=1", "linear", "linear:shared_credit=0.3,decay=0.5,temperature=0.2"),
    *("lmetric:credit=0.9", "cache-aware:balance_abs=2", "default"),
)


@pytest.mark.parametrize("policy", POLICIES)
async def test_the_gateway_and_the_simulation_choose_the_same_workers(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = Recorded(chats(7), policy)
    simulated.run()
    clock, events_clock = Clock(), Clock()
    monkeypatch.setattr("beluga.gateway.director.time", clock)
    monkeypatch.setattr("beluga.gateway.cache.time", events_clock)

    def play(simulated: Recorded, replayed: Replayed) -> None:
        wanted, got = [], []
        tracker = replayed.service._router.tracker
        for kind, what in simulated.steps:
            if kind == "route":
                request, query, caches, worker, now = what
                wanted.append(worker)
                for engine in replayed.service.fleet:
                    engine.health = Health.UP  # no engine answers the checks here
                got.append(replayed.route(request, query, caches, now))
            elif kind == "publish":
                worker, metrics = what
                tracker.publish(Worker(worker.worker_id + 1), metrics)
            else:
                request, now = what
                getattr(tracker, kind)(replayed.names[request], now)
        assert got == wanted
        assert len(wanted) == 120 - simulated.refused
        assert len(set(wanted)) == WORKERS

    engines = tuple(EngineSpec(f"http://127.0.0.1:{9 + n}", ("m",)) for n in range(WORKERS))
    given = Settings(
        policy=policy, engines=engines, listen=ANY_PORT, admin=None,
        block_size=BLOCK, queue_threshold=0.0, advise_s=0.0, seed=0,
        limits=Limits(health_interval_s=3600, drain_s=0.0),
    )  # fmt: skip
    async with Service(given) as service:
        play(simulated, Replayed(service, clock, events_clock))
