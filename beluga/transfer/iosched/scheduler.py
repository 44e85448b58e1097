# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Drives copy engines over a link: whose piece goes next, among all processes of this host.

::

    link = Link("cxl0", pool=pool)
    with Scheduler(link) as scheduler:
        job = scheduler.submit(plan, engine, Direction.READ, TransferClass.ONBOARD)
        job.wait()
        cache = KVCache(engine=scheduler.engine(engine))  # all that it puts and gets

A plan is cut into pieces (at its chunks if it has checksums), and a piece is let onto the link
*before* its copy starts. Every engine
has a thread here, and is used by no other. The choice itself is C without the GIL
(``csrc/iosched/admit.c``); Python only hands pieces over.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from beluga._shared import when_forked
from beluga.errors import LayoutError, TransferError
from beluga.transfer.engine import Direction, Engine
from beluga.transfer.iosched.job import Job
from beluga.transfer.iosched.link import Link, TransferClass
from beluga.transfer.iosched.place import Carried
from beluga.transfer.iosched.port import Port
from beluga.transfer.plan.plan import Plan


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
        self._closed = False
        self._forget()
        when_forked(self)

    def _forget(self) -> None:
        """In a forked child: the threads that copy are the parent's, and what holds the lock."""
        self._lock = threading.Lock()
        self._ports: dict[int, Port] = {}

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
        least = getattr(engine, "piece_size", 0)  # of one that is slow to start
        job = Job(plan, direction, kind, max(least, self.link.settings.piece_size), blocks)
        with self._lock:
            if self._closed:
                raise TransferError("the scheduler is closed")
            port = self._ports.get(id(engine))
            if port is None:
                port = self._ports[id(engine)] = Port(self.link, engine, self._depth)
            if port.closing:
                raise TransferError(f"{engine.name} is being released; submit when it has been")
            port.push(job)
        return job

    def engine(
        self,
        engine: Engine,
        *,
        read: TransferClass = TransferClass.ONBOARD,
        write: TransferClass = TransferClass.OFFLOAD,
    ) -> ScheduledEngine:
        """The engine as one whose every copy waits for its turn, in these classes."""
        return ScheduledEngine(self, engine, read, write)

    def release(self, engine: Engine) -> None:
        """Drop what waits for an engine, wait for what is under way, and use it no more."""
        with self._lock:
            port = self._ports.get(id(engine))
        if port is not None:
            self._close(id(engine), port)

    def carried(self) -> dict[TransferClass, Carried]:
        """What this process's engines were let on for here, by class, and how long it waited."""
        with self._lock:
            places = [port.place for port in self._ports.values()]
        total = {kind: Carried() for kind in TransferClass}
        for place in places:
            for kind in TransferClass:
                total[kind] = total[kind].plus(place.carried(kind))
        return total

    def close(self) -> None:
        """Drop what waits, and wait for what is under way. Engines stay open."""
        with self._lock:
            self._closed = True
            ports = dict(self._ports)
        for key, port in ports.items():
            self._close(key, port)

    def _close(self, key: int, port: Port) -> None:
        """It is forgotten when it is closed, not before: a close may be interrupted."""
        port.close()
        with self._lock:
            self._ports.pop(key, None)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ScheduledEngine:
    """An engine behind a scheduler: to whoever has it, an engine like any other.

    Its transfers are jobs. What an engine of this kind refuses without knowing the machine is
    refused at once; what only the engine itself can tell is raised by the job's ``wait``.
    """

    def __init__(
        self, scheduler: Scheduler, engine: Engine, read: TransferClass, write: TransferClass
    ) -> None:
        self.name = f"{engine.name}-scheduled"
        self._scheduler, self._engine = scheduler, engine
        self._read, self._write = read, write

    @property
    def fault(self) -> str | None:
        """The engine's, if it tells of any."""
        found: str | None = getattr(self._engine, "fault", None)
        return found

    def gather_write(self, plan: Plan) -> Job:
        """Scattered engine memory to the pool, when its turn is. Raises LayoutError."""
        if plan.sparse:
            raise LayoutError("a sparse plan can only be read")
        return self._submit(plan, Direction.WRITE, self._write)

    def scatter_read(self, plan: Plan) -> Job:
        """The pool to scattered engine memory, when its turn is. Raises LayoutError."""
        return self._submit(plan, Direction.READ, self._read)

    def close(self) -> None:
        """Close the engine; the scheduler stays."""
        self._scheduler.release(self._engine)
        self._engine.close()

    def _submit(self, plan: Plan, direction: Direction, kind: TransferClass) -> Job:
        if (pool := self._scheduler.link.pool) is not None:
            plan.refuse_beyond(pool.geometry.size)
        return self._scheduler.submit(plan, self._engine, direction, kind)
