# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Several processes that serve one port: ``beluga gateway --processes N``.

::

    clients --SO_REUSEPORT--> process 0, 1, ... --> engines
                                  | control.py
    operators --admin port--> supervisor

The supervisor forwards no requests. It starts the processes with its own command line, replaces
those that end, owns the list of workers with their numbers, and has the operators' listener. Each
process is a whole gateway: it checks the engines, follows their KV events, and decides by itself.
``peers.py`` has what the processes share.

The kernel gives each connection to one of the processes' listening sockets. The supervisor keeps
these sockets open, so connections to a process that has ended wait for its replacement.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from beluga import child, config
from beluga.errors import RouterError
from beluga.gateway.acceptor import bound_sockets, listen, raise_file_limit, shares
from beluga.gateway.admin import ADMIN_BODY_MAX, AdminHandlers, described, json_response
from beluga.gateway.answers import Refusal
from beluga.gateway.callers import of_operators
from beluga.gateway.control import Command, ControlChannel, NumberedWorker, Statement
from beluga.gateway.engine import Engine, Health
from beluga.gateway.exposition import Family, Series, counts_of, merged
from beluga.gateway.fleet import Fleet
from beluga.gateway.handlers import refusals
from beluga.gateway.health import end_tasks
from beluga.gateway.listener import check_endpoint
from beluga.gateway.metrics import Metrics
from beluga.gateway.peers import WORKERS_MAX, ProcessResources, memory_size, words_of
from beluga.gateway.service import add_workers, follows_caches, serve, serve_as_one
from beluga.gateway.settings import Address, Settings
from beluga.router import Decision

log = logging.getLogger(__name__)

REPLY_S = 10.0
"""How long a process may take to reply; it reads commands between any two requests."""
RESTART_S = (0.2, 10.0)
"""The pause before a process is replaced, and its upper bound: it doubles while processes end
within ``STEADY_S`` seconds.
"""
STEADY_S = 10.0
_STOP_S = 10.0  # for a process to end, beyond Limits.drain_s
_LOOK_S = 0.02
_MAILBOX_SIZE = 1 << 22  # bytes of messages; the system may allow less
_RESTARTS = "beluga_gateway_process_restarts"
_WORST = (Health.DOWN, Health.STARTING, Health.UP)


class GatewayProcess:
    """A running process, and what the supervisor keeps of it."""

    def __init__(self, number: int, program: subprocess.Popen[bytes], control: ControlChannel):
        self.number = number
        self.program = program
        self.control = control
        self.started_s = time.monotonic()
        self.ready = asyncio.get_running_loop().create_future()
        self.workers: set[int] = set()  # workers that it has
        self.families: list[Family] = []  # the metrics at the last scrape


class SupervisedFleet(Fleet):
    """The list of workers. ``drained`` is called for each worker that is to be drained; the worker
    leaves when no process has it, and these are its ``inflight``.
    """

    def __init__(self, drained: Callable[[Engine], None]) -> None:
        super().__init__()
        self._drained = drained

    def drain(self, engine: Engine) -> None:
        engine.draining = True
        self._drained(engine)
        self.settle(engine)


class Supervisor:
    """Runs ``processes`` as a context manager. ``arguments`` are those of ``beluga`` with which a
    process is started. Entering raises RouterError or OSError.
    """

    def __init__(self, settings: Settings, processes: int, arguments: Sequence[str]) -> None:
        self._settings = settings
        self._count = processes
        self._arguments = list(arguments)
        self._cleanup = contextlib.AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[int, GatewayProcess] = {}
        self._slots: dict[int, int] = {}  # by worker
        self._joining: dict[int, asyncio.Task[str]] = {}  # by worker
        self._ended: list[Family] = []  # counts of processes that have ended
        self._stopping = False
        self._follows = follows_caches(settings)
        self.restarts = 0
        self.fleet = SupervisedFleet(self._drained)
        self.decision = Decision(settings.prefill.rule, **dict(settings.prefill.thresholds))
        self._thresholds: dict[str, float | int | None] | None = None  # as changed by operators
        self.address = settings.listen
        self.admin_address = settings.admin

    async def __aenter__(self) -> Supervisor:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._stop)
            await self._start(stack)
            self._cleanup = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await self._cleanup.aclose()

    def url_of(self, address: Address) -> str:
        """Return the URL of one of its addresses."""
        return self._settings.callers.url_of(address)

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self._settings
        self._listeners = []
        for of_process in await bound_sockets(settings.listen, self._count):
            self._listeners.append([stack.enter_context(one) for one in of_process])
        self.address = Address(*self._listeners[0][0].getsockname()[:2])
        of_admin: list[socket.socket] = []  # bound before any process starts
        if settings.admin is not None:
            (of_admin,) = await bound_sockets(settings.admin)
            for one in of_admin:
                stack.enter_context(one)
        self._memory = os.memfd_create("beluga-gateway")
        stack.callback(os.close, self._memory)
        os.ftruncate(self._memory, memory_size(self._count))
        self._mapped = mmap.mmap(self._memory, memory_size(self._count))
        self._mailboxes = [_mailbox(stack) for _ in range(self._count)]
        self.fleet.on_change(joined=self._joined, left=self._left)
        await add_workers(stack, settings, self.fleet)
        started = [await self._spawn(number) for number in range(self._count)]
        for failed in await asyncio.gather(
            *(each.ready for each in started), return_exceptions=True
        ):
            if isinstance(failed, BaseException):
                raise failed
        if settings.admin is not None:
            await self._open_admin(stack, settings.admin, of_admin)

    async def _open_admin(
        self, stack: contextlib.AsyncExitStack, address: Address, sockets: list[socket.socket]
    ) -> None:
        settings = self._settings
        share = shares()[1]
        app = web.Application(
            client_max_size=ADMIN_BODY_MAX,
            middlewares=[
                share.follow,
                refusals(Metrics(), browsers=False),
                of_operators(settings, address),
            ],
        )
        app.add_routes(SupervisorHandlers(self).routes())
        acceptor = await listen(stack, sockets, app, share, settings.callers.tls)
        self.admin_address = acceptor.address

    # ---- processes

    async def _spawn(self, number: int) -> GatewayProcess:
        """Start the process with this number. The caller waits until it is ready."""
        with contextlib.ExitStack() as stack:
            mine, other = socket.socketpair()
            stack.enter_context(other)
            receive, _ = self._mailboxes[number]
            place = ProcessResources(
                number,
                self._count,
                control=other.fileno(),
                memory=self._memory,
                mailbox=receive.fileno(),
                mailboxes=[send.fileno() for _, send in self._mailboxes],
                listeners=[one.fileno() for one in self._listeners[number]],
            )
            inherited = [place.control, place.memory, place.mailbox]
            program = child.start(
                "beluga.cli.main",
                *self._arguments,
                stdin=subprocess.DEVNULL,
                env=config.with_gateway_process(msgspec.json.encode(place).decode()),
                pass_fds=[*inherited, *place.mailboxes, *place.listeners],
            )
        control = await ControlChannel.open(mine, Statement)
        found = self._running[number] = GatewayProcess(number, program, control)
        found.workers = {engine.worker.worker_id for engine in self.fleet if not engine.draining}
        for engine in self.fleet:
            engine.inflight += not engine.draining
        members = [self._member(engine) for engine in self.fleet if not engine.draining]
        control.send(Command("begin", members=members, thresholds=self._thresholds or {}))
        self._run(self._follow(found))
        return found

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, process: GatewayProcess) -> None:
        """Read what a process sends until it ends, and then replace it."""
        while (statement := await process.control.receive()) is not None:
            self._handle(process, statement)
        await self._wait(process)
        self._clear(process)
        if not process.ready.done():
            self._running.pop(process.number, None)
            process.ready.set_exception(
                RouterError(f"process {process.number} of the gateway ended while it started")
            )
        if not self._stopping and self._running.get(process.number) is process:
            await self._replace(process)

    def _handle(self, process: GatewayProcess, statement: Statement) -> None:
        if statement.kind == "reply":
            process.control.replied(statement.ticket, statement.result, statement.error)
        elif statement.kind == "ready" and not process.ready.done():
            process.ready.set_result(None)
        elif statement.kind == "failed" and not process.ready.done():
            self._running.pop(process.number, None)
            process.ready.set_exception(RouterError(statement.error))
        elif statement.kind == "left":
            self._gone(process, statement.worker)
        elif statement.kind == "scrape":
            self._run(self._scrape(process, statement.ticket))

    async def _replace(self, ended: GatewayProcess) -> None:
        """Start another process until one is ready."""
        pause_s, longest_s = RESTART_S
        number, lived_s = ended.number, time.monotonic() - ended.started_s
        status = ended.program.returncode
        why = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        log.warning("process %d of the gateway has ended %s; another one starts", number, why)
        while True:
            if lived_s < STEADY_S:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            started = await self._spawn(number)
            try:
                await started.ready
            except RouterError as error:
                log.error("process %d of the gateway did not start: %s", number, error)
                lived_s = 0.0
            else:
                self.restarts += 1
                return

    async def _wait(self, process: GatewayProcess, patience_s: float = _STOP_S) -> None:
        """Wait until a process has ended, and kill it if it does not."""
        deadline = time.monotonic() + patience_s
        while process.program.poll() is None:
            if time.monotonic() > deadline:
                process.program.kill()
            await asyncio.sleep(_LOOK_S)

    def _clear(self, process: GatewayProcess) -> None:
        """Drop what an ended process has counted, except for its metrics."""
        process.control.close()
        for part in words_of(self._mapped, self._count, process.number):
            part[:] = bytes(len(part))
            part.release()
        for worker in list(process.workers):
            self._gone(process, worker)
        self._ended = merged([self._ended, counts_of(process.families)])
        process.families = []

    async def _stop(self) -> None:
        """End all processes; their running requests have ``Limits.drain_s``."""
        self._stopping = True
        running = list(self._running.values())
        for process in running:
            process.control.send(Command("stop"))
        patience_s = self._settings.limits.drain_s + _STOP_S
        try:
            await asyncio.gather(*(self._wait(process, patience_s) for process in running))
        finally:
            for process in running:
                process.program.kill()
                process.program.wait()
            await end_tasks(self._tasks)

    # ---- workers

    def _member(self, engine: Engine) -> NumberedWorker:
        number = engine.worker.worker_id
        return NumberedWorker(number, self._slots[number], engine.spec)

    def _joined(self, engine: Engine) -> None:
        """Number a new worker, and add it in all processes."""
        if self._follows:
            for endpoint, replay in engine.spec.feeds:
                check_endpoint(endpoint, replay)
        number = engine.worker.worker_id
        free = set(range(WORKERS_MAX)).difference(self._slots.values())
        if not free:
            raise RouterError(f"there are {WORKERS_MAX} workers already; remove one first")
        self._slots[number] = min(free)
        if self._running:
            task = asyncio.get_running_loop().create_task(self._add(engine))
            self._joining[number] = task
            task.add_done_callback(lambda _: self._joining.pop(number, None))

    async def _add(self, engine: Engine) -> str:
        """Add a worker in all processes. Returns why it was refused, or ""."""
        number, members = engine.worker.worker_id, [self._member(engine)]
        replies_due = []
        for process in self._running.values():
            process.workers.add(number)
            engine.inflight += 1
            replies_due.append(process.control.call(Command("join", members=members), REPLY_S))
        replies = await asyncio.gather(*replies_due, return_exceptions=True)
        refused = next((str(one) for one in replies if isinstance(one, RouterError)), "")
        if refused and not engine.gone:
            log.warning("%s cannot join: %s", engine.url, refused)
            self.fleet.remove(engine)
        return refused

    async def joined(self, engine: Engine) -> None:
        """Wait until all processes have a new worker. Raises RouterError."""
        if (task := self._joining.get(engine.worker.worker_id)) is not None and (why := await task):
            raise RouterError(why)

    def _left(self, engine: Engine) -> None:
        self._send_all(Command("leave", worker=engine.worker.worker_id))
        self._free_slot(engine.worker.worker_id)

    def _drained(self, engine: Engine) -> None:
        self._send_all(Command("drain", worker=engine.worker.worker_id))

    def _gone(self, process: GatewayProcess, worker: int) -> None:
        """Record that a process has removed a worker."""
        if worker not in process.workers:
            return
        process.workers.discard(worker)
        with contextlib.suppress(RouterError):
            engine = self.fleet[worker]
            engine.inflight -= 1
            self.fleet.settle(engine)
        self._free_slot(worker)

    def _free_slot(self, worker: int) -> None:
        """Let another worker have the slot of one that is not used any more."""
        known = any(engine.worker.worker_id == worker for engine in self.fleet)
        if not known and not any(worker in each.workers for each in self._running.values()):
            self._slots.pop(worker, None)

    def change_thresholds(self, thresholds: dict[str, float | int | None]) -> None:
        """Change the rule of remote prefill in all processes. Raises RouterError."""
        self.decision.update(thresholds)
        self._thresholds = thresholds
        self._send_all(Command("thresholds", thresholds=thresholds))

    def _send_all(self, command: Command) -> None:
        for process in self._running.values():
            process.control.send(command)

    async def call_all(self, what: str) -> list[Any]:
        """Return the results of a question to all processes; those that do not reply are left
        out.
        """
        replies_due = (one.control.call(Command(what), REPLY_S) for one in self._running.values())
        replies = await asyncio.gather(*replies_due, return_exceptions=True)
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    # ---- metrics

    async def _scrape(self, process: GatewayProcess, ticket: int) -> None:
        """Send the metrics of all processes to one of them."""
        families = merged(await self._families())
        process.control.send(Command("reply", ticket, result=families))

    async def _families(self) -> list[list[Family]]:
        running = list(self._running.values())

        async def read(process: GatewayProcess) -> None:
            with contextlib.suppress(RouterError):
                reply = await process.control.call(Command("families"), REPLY_S)
                process.families = msgspec.convert(reply, list[Family])

        await asyncio.gather(*(read(process) for process in running))
        urls = [engine.url for engine in self.fleet]
        own = Series(f"{_RESTARTS}_total", {}, self.restarts)
        return [
            [Family(_RESTARTS, "counter", "Processes that were replaced", [own])],
            counts_of(self._ended, urls),
            *(process.families for process in running),
        ]


class SupervisorHandlers(AdminHandlers):
    """The admin API, for all processes."""

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__(supervisor.fleet, None, supervisor.decision)
        self._supervisor = supervisor

    async def _described(self, engine: Engine) -> dict[str, object]:
        number = engine.worker.worker_id
        rows = [
            row
            for rows in await self._supervisor.call_all("workers")
            for row in rows
            if row["id"] == number
        ]
        return _combined(engine, rows)

    async def _list(self, _: web.Request) -> web.Response:
        rows = [row for rows in await self._supervisor.call_all("workers") for row in rows]
        return json_response(
            [
                _combined(engine, [row for row in rows if row["id"] == engine.worker.worker_id])
                for engine in self._supervisor.fleet
            ]
        )

    async def _joined(self, engine: Engine) -> None:
        await self._supervisor.joined(engine)

    async def _pool(self, _: web.Request) -> web.Response:
        found = [one for one in await self._supervisor.call_all("pool") if one is not None]
        if not found:
            raise Refusal(404, "the router reads no pool's events: set --pool-events")
        return json_response(found[0])

    def _change(self, thresholds: dict[str, float | int | None]) -> None:
        self._supervisor.change_thresholds(thresholds)


def _combined(engine: Engine, rows: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Return a worker as JSON: the requests of all processes, and the worst health of any."""
    if not rows:
        return described(engine) | {"requests": 0}
    worst = min(rows, key=lambda row: _WORST.index(Health(row["health"])))
    return worst | {
        "draining": engine.draining,
        "requests": sum(row["requests"] for row in rows),
        "cooling_s": max(row["cooling_s"] for row in rows),
        "problems": {kind: text for row in rows for kind, text in row["problems"].items()},
    }


def _mailbox(stack: contextlib.ExitStack | contextlib.AsyncExitStack) -> Any:
    """Return two ends of a mailbox: its process receives from the first, others send to the
    second.
    """
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in ends:
        stack.enter_context(end)
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAILBOX_SIZE)
    return ends


class Listening(Protocol):
    """A started gateway."""

    address: Address
    admin_address: Address | None

    def url_of(self, address: Address) -> str:
        """Return the URL of one of its addresses."""


async def serve_together(
    settings: Settings, processes: int, started: Callable[[Listening], None]
) -> None:
    """Run a gateway until SIGTERM or SIGINT, then drain. It has several processes if ``processes``
    is greater than 1; each of them is started with this process's own command line, and calls this
    function, too. Raises RouterError or OSError.
    """
    if (resources := config.gateway_process()) is not None:
        await serve_as_one(settings, ProcessResources.read(resources))
    elif processes > 1:
        await _supervise(settings, processes, started)
    else:
        await serve(settings, started)


async def _supervise(
    settings: Settings, processes: int, started: Callable[[Listening], None]
) -> None:
    raise_file_limit()
    must_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, must_end.set)
    async with Supervisor(settings, processes, sys.argv[1:]) as supervisor:
        started(supervisor)
        await must_end.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # a second signal ends the process at once
        log.info("stopping; running requests have %g s", settings.limits.drain_s)
