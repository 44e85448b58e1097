# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A process's part in a gateway of several processes: it carries out the supervisor's commands, and
applies what its peers report.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from beluga.errors import RouterError
from beluga.gateway.admin import described, pool_of
from beluga.gateway.cache import Cache
from beluga.gateway.control import Command, ControlChannel, NumberedWorker, Statement
from beluga.gateway.director import Director
from beluga.gateway.engine import Engine
from beluga.gateway.exposition import Family, families_of
from beluga.gateway.fleet import Fleet
from beluga.gateway.health import end_tasks
from beluga.gateway.metrics import Metrics
from beluga.gateway.peers import Peers, ProcessResources, inherited
from beluga.router import Decision, RecordsPrompts, Worker

log = logging.getLogger(__name__)

SCRAPE_S = 15.0
"""How long the metrics of all processes may take; Prometheus waits for 10 s by default."""


class Measured(Protocol):
    """A service with metrics."""

    metrics: Metrics

    def measure(self) -> None:
        """Update the gauges."""


class Membership:
    """The connections of a process to its supervisor and to its peers, as a context manager.
    ``must_end`` is set when the process must end.
    """

    def __init__(self, place: ProcessResources, must_end: asyncio.Event) -> None:
        self._place = place
        self._must_end = must_end
        self._stopped = False
        self._first: Command | None = None
        self._service: Measured | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.peers = Peers(place, self._count_lost)
        self.listeners = [inherited(descriptor) for descriptor in place.listeners]

    async def __aenter__(self) -> Membership:
        control = inherited(self._place.control)
        control.setblocking(False)
        self._control = await ControlChannel.open(control, Command)
        self._first = await self._control.receive()
        if self._first is None:
            raise RouterError("the supervisor of this process has ended")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._tasks)
        self._control.close()

    def join(
        self,
        fleet: Fleet,
        director: Director,
        cache: Cache,
        decision: Decision,
        look: Callable[[], None],
    ) -> None:
        """Take the parts of the service to which commands and messages apply. ``look`` tries
        waiting requests.
        """
        self._fleet, self._director, self._cache = fleet, director, cache
        self._decision = decision
        fleet.on_change(joined=lambda _: None, left=self._left)
        self.peers.follow(sent=self._was_sent, made=director.responses.remember, look=look)

    def admit_first(self) -> None:
        """Add the workers that the supervisor has. Raises RouterError."""
        assert self._first is not None  # noqa: S101  see __aenter__
        if self._first.thresholds:
            self._decision.update(self._first.thresholds)
        for member in self._first.members:
            self._admit(member)

    def ready(self, service: Measured) -> None:
        """Report that the service accepts connections, and carry out commands from now on."""
        self._service = service
        self._tasks.append(asyncio.get_running_loop().create_task(self._follow()))
        self._control.send(Statement("ready"))

    async def failed(self, why: str) -> None:
        """Report that the service cannot start, and wait until the supervisor has read it."""
        self._control.send(Statement("failed", error=why))
        await self._control.flush()

    async def scrape(self) -> list[Family]:
        """Return the metrics of all processes. Raises RouterError."""
        found = await self._control.call(Statement("scrape"), SCRAPE_S)
        return msgspec.convert(found, list[Family])

    def _was_sent(self, worker: Worker, hashes: Sequence[int]) -> None:
        """Record the blocks of a prompt that another process sent to a worker."""
        if not any(engine.worker == worker for engine in self._fleet):
            return
        self._cache.was_sent(worker, hashes)
        if isinstance(self._director.policy, RecordsPrompts):
            self._director.policy.was_sent(worker, hashes)

    def _count_lost(self) -> None:
        if self._service is not None:
            self._service.metrics.message_lost()

    def _admit(self, member: NumberedWorker) -> Engine:
        self.peers.loads.assign(Worker(member.number), member.slot)
        return self._fleet.admit(member.spec, member.number)

    def _left(self, engine: Engine) -> None:
        self._control.send(Statement("left", worker=engine.worker.worker_id))

    async def _follow(self) -> None:
        """Carry out commands until the supervisor has ended."""
        while (command := await self._control.receive()) is not None:
            if command.do == "reply":
                self._control.replied(command.ticket, command.result)
                continue
            try:
                result, error = self._do(command), ""
            except RouterError as why:
                result, error = None, str(why)
            if command.ticket:
                self._control.send(Statement("reply", command.ticket, 0, result, error))
        if self._stopped:
            os._exit(1)  # the supervisor was ended while it waited for this process
        log.error("the supervisor of this process has ended, so it stops")
        self._must_end.set()

    def _do(self, command: Command) -> Any:
        """Carry out a command. Returns its result. Raises RouterError."""
        assert self._service is not None  # noqa: S101  see ready()
        if command.do == "join":
            for member in command.members:
                self._admit(member)
        elif command.do in ("drain", "leave"):
            self._change(command.worker, command.do)
        elif command.do == "thresholds":
            self._decision.update(command.thresholds)
        elif command.do == "workers":
            return [described(engine) for engine in self._fleet]
        elif command.do == "pool":
            return pool_of(self._cache)
        elif command.do == "families":
            self._service.measure()
            return families_of(self._service.metrics.registry)
        elif command.do == "stop":
            self._stopped = True
            self._must_end.set()
        return None

    def _change(self, number: int, change: str) -> None:
        for engine in self._fleet:
            if engine.worker.worker_id == number:
                (self._fleet.drain if change == "drain" else self._fleet.remove)(engine)
