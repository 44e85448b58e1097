# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Drives copy engines over a link: whose piece goes next, among all processes of this host.

::

    link = Link("cxl0", pool=pool)
    with Scheduler(link) as scheduler:
        job = scheduler.submit(plan, engine, Direction.READ, TransferClass.ONBOARD)
        job.wait()

A plan is cut into pieces, and a piece is let onto the link *before* its copy starts. Every engine
has a thread here, and is used by no other. The choice itself is C without the GIL
(``csrc/admit.c``); Python only hands pieces over.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from beluga.errors import TransferError
from beluga.transfer.engine import Engine
from beluga.transfer.job import Job
from beluga.transfer.link import Direction, Link, TransferClass
from beluga.transfer.plan import Plan
from beluga.transfer.port import Delay, Port


class Scheduler:
    """One process's use of a link; any thread may submit.

    ``depth`` pieces of an engine may be under way at a time, where it can do several.
    """

    def __init__(self, link: Link, *, depth: int = 2) -> None:
        if depth < 1:
            raise TransferError(f"{depth} pieces under way; an engine needs at least one")
        self.link = link
        self._depth = depth
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ports: dict[int, Port] = {}
        self._closed = False

    def submit(
        self,
        plan: Plan,
        engine: Engine,
        direction: Direction,
        kind: TransferClass,
        *,
        blocks: object = None,
    ) -> Job:
        """Have the engine write or read a plan when its turn is. Ends like a transfer.

        The plan's memory must stay until the job has ended. ``blocks`` is whatever stands for the
        engine's hold on them: it is referred to weakly, and when it goes, the job is dropped after
        the pieces that are under way. So an offload does not keep blocks that the engine needs for
        something else; as a job that was dropped is never published, it does not matter that the
        last pieces may have other bytes.

        Raises TransferError if this is closed, or the parent process's, or the plan itself keeps
        ``blocks``.
        """
        if os.getpid() != self._pid:
            raise TransferError("this scheduler is the parent process's; make another one")
        job = Job(plan, direction, kind, self.link.settings.piece_size, blocks)
        with self._lock:
            if self._closed:
                raise TransferError("the scheduler is closed")
            port = self._ports.get(id(engine))
            if port is None:
                port = self._ports[id(engine)] = Port(self.link, engine, self._depth)
            port.push(job)
        return job

    def delays(self) -> dict[TransferClass, Delay]:
        """How long the pieces of each class have waited before they were let onto the link."""
        with self._lock:
            ports = list(self._ports.values())
        total = {kind: Delay() for kind in TransferClass}
        for port in ports:
            for kind, delay in port.delays.items():
                total[kind] = total[kind].plus(delay)
        return total

    def close(self) -> None:
        """Drop what waits, and wait for what is under way. Engines stay open."""
        with self._lock:
            self._closed = True
            ports, self._ports = list(self._ports.values()), {}
        for port in ports:
            port.close()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
