# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The running gateway: assembles the parts, opens the listeners, and drains at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from aiohttp import web

from beluga.errors import RouterError
from beluga.gateway.acceptor import (
    listen,
    of_clients,
    of_operators,
    raise_file_limit,
    shares,
)
from beluga.gateway.admin import ADMIN_BODY_MAX, AdminHandlers, Adviser
from beluga.gateway.cache import Cache
from beluga.gateway.conversation import load_tokenizer
from beluga.gateway.director import Director, Placement, WaitQueue
from beluga.gateway.engine import Engine
from beluga.gateway.engine_client import EngineClient
from beluga.gateway.fleet import Fleet, WorkersFile
from beluga.gateway.handlers import Bodies, ClientHandlers, refusals
from beluga.gateway.health import Checker, Reports, Watch, end_tasks
from beluga.gateway.metrics import Metrics
from beluga.gateway.proxy import Proxy
from beluga.gateway.remote import Remote
from beluga.gateway.settings import Address, Settings
from beluga.gateway.tokenizers import Tokenizers
from beluga.router import (
    DEFAULT_POLICY,
    BusyThresholds,
    Decision,
    Load,
    LoadTracker,
    PredictiveIndexer,
    Remembers,
    Router,
    Worker,
    make_policy,
)

log = logging.getLogger(__name__)

_POLL_S = 0.02


class Service:
    """One router as a context manager. At the end it drains: it accepts no new requests, running
    ones have ``Limits.drain_s`` to finish, and the rest is aborted.

    ``address`` and ``admin_address`` are its listening addresses. Raises BadValueError for an
    operators' address that needs a token. Entering raises RouterError or OSError.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        admin = settings.admin
        self._check_operator = None if admin is None else of_operators(settings, admin)
        self._cleanup = contextlib.AsyncExitStack()
        self.fleet = Fleet()
        self.metrics = Metrics()
        self.address = settings.listen
        self.admin_address = settings.admin

    async def __aenter__(self) -> Service:
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._cleanup = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.drain()
        finally:
            await self._cleanup.aclose()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        settings, limits = self._settings, self._settings.limits
        client = await stack.enter_async_context(EngineClient())
        seed, estimator = settings.seed or 0, settings.estimator
        policy = make_policy(settings.policy, seed=seed, estimator=estimator)
        apart = bool(settings.prefill.queues)  # the rule needs cached blocks under every policy
        self._cache = Cache(
            wanted=policy.uses_overlap or apart,
            hashed=isinstance(policy, Remembers),
            block_size=settings.block_size,
            announced=any(spec.events for spec in settings.engines),
            is_adapter=self.fleet.is_adapter,
            space_of=self.fleet.space,
            metrics=self.metrics,
            pool_events=settings.pool_events,
            pool_events_token=settings.pool_events_token,
            needs_events=policy.name != DEFAULT_POLICY,
            ranks=settings.index_ranks,
        )
        stack.callback(self._cache.close)
        self._wait_queue: WaitQueue[Placement] = WaitQueue(
            limits.queued_max, order=settings.queue, give_back=Placement.end
        )
        self._router = Router(
            policy,
            tracker=LoadTracker(),
            find_matches=self._cache.find_matches,
            always_match=apart,
            wait_above=BusyThresholds(prefill_batches=settings.queue_threshold or None),
            on_index_error=lambda error: log.warning("the index failed: %s", error),
            name_of=lambda worker: self.fleet[worker.worker_id].url,
        )
        self._director = Director(
            fleet=self.fleet,
            router=self._router,
            cache=self._cache,
            metrics=self.metrics,
            limits=limits,
            wait_queue=self._wait_queue,
        )
        self.fleet.on_change(joined=self._cache.joined, left=self._cache.left)
        rule = settings.prefill
        self._decision = Decision(rule.rule, **dict(rule.thresholds))
        await self._open_handlers(stack, client)
        self._watch(stack)
        await self._open_listeners(stack)
        if not len(self.fleet):
            log.warning(
                "no worker is configured, so every request is refused with status 503; add one "
                "with --worker, --workers-file, or POST /workers on the admin port"
            )

    def _watch(self, stack: contextlib.AsyncExitStack) -> None:
        """Report problems, and advise."""
        watch = Watch(self.fleet, self.metrics, self._cache.problems)
        tasks = [asyncio.get_running_loop().create_task(watch.run())]
        if self._settings.advise_s:
            adviser = Adviser(
                fleet=self.fleet,
                metrics=self.metrics,
                loads=self.loads,
                pending=self.pending,
                goals=self._settings.goals,
            )
            advice = adviser.run(self._settings.advise_s)
            tasks.append(asyncio.get_running_loop().create_task(advice))
        stack.push_async_callback(end_tasks, tasks)

    async def _open_listeners(self, stack: contextlib.AsyncExitStack) -> None:
        """Accept clients' and operators' connections."""
        settings = self._settings
        answers = refusals(self.metrics, browsers=True)
        app = web.Application(
            client_max_size=settings.limits.body_size_max,
            middlewares=[self._clients.follow, answers, of_clients(settings)],
        )
        app.add_routes(self._handlers.routes())
        tls = settings.callers.tls
        self.address = await listen(stack, settings.listen, app, self._clients, tls)
        if settings.admin is not None and self._check_operator is not None:
            answers = refusals(self.metrics, browsers=False)
            app = web.Application(
                client_max_size=ADMIN_BODY_MAX,
                middlewares=[self._operators.follow, answers, self._check_operator],
            )
            app.add_routes(AdminHandlers(self.fleet, self._cache, self._decision).routes())
            self.admin_address = await listen(stack, settings.admin, app, self._operators, tls)

    async def _open_handlers(self, stack: contextlib.AsyncExitStack, client: EngineClient) -> None:
        """Open the parts that serve clients and watch the engines. Engines join afterwards, so that
        their files do not count as the clients'.
        """
        settings = self._settings
        reports = Reports(
            *(client.session, self._router.tracker, settings.limits),
            learn=self._cache.learn,
            restarted=self._cache.restarted,
        )
        remote = await Remote.open(
            settings.prefill,
            self._decision,
            self._router.tracker.load,
            self.metrics,
            settings.estimator,
        )
        stack.push_async_callback(remote.close)
        tokenizer = None
        if settings.tokenizer is not None:
            tokenizer = load_tokenizer(
                settings.tokenizer,
                settings.chat_template,
                trusted=settings.trust_request_chat_template,
            )
            self._cache.template_problem = tokenizer.problem
        tokenizers = Tokenizers(
            *(client.session, self.fleet, settings.limits, tokenizer),
            follows=self._cache.follows,
            trusted=settings.trust_request_chat_template,
        )

        async def look(engine: Engine) -> None:
            await reports.read(engine)
            if self._cache.index is not None:
                await tokenizers.look(engine)

        checker = Checker(
            self.fleet, client.session, settings.limits, up=self._wait_queue.look, also=look
        )
        stack.push_async_callback(checker.close)
        proxy = Proxy(
            director=self._director,
            client=client,
            metrics=self.metrics,
            limits=settings.limits,
            tokenizers=tokenizers,
            remote=remote,
        )
        await self._add_workers(stack)
        reserved = sum(_connections(engine) for engine in self.fleet)
        self._clients, self._operators = shares(reserved)
        self._handlers = ClientHandlers(
            fleet=self.fleet,
            proxy=proxy,
            scrape=self._scrape,
            requests_max=self._clients.requests_max,
            bodies=Bodies(settings.limits),
        )

    async def _add_workers(self, stack: contextlib.AsyncExitStack) -> None:
        """Add the configured workers, and follow the workers file. Raises RouterError."""
        settings = self._settings
        for spec in settings.engines:
            self.fleet.add(spec)
        if settings.workers_file is not None:
            watched = WorkersFile(settings.workers_file, self.fleet)
            watched.read()
            task = asyncio.get_running_loop().create_task(watched.watch())
            stack.push_async_callback(end_tasks, [task])
        elif not settings.engines and settings.admin is None:
            raise RouterError(
                "no worker is configured; give one, or a file or an admin API to add one later"
            )

    async def drain(self) -> None:
        """Accept no new requests, and wait up to ``Limits.drain_s`` until the running ones have
        ended.
        """
        self._handlers.stopping = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.limits.drain_s
        while (left := self.pending() + self._director.placed) and loop.time() < deadline:
            await asyncio.sleep(_POLL_S)
        if left:
            log.warning("%d requests had not ended after %g s", left, self._settings.limits.drain_s)

    def loads(self) -> Mapping[Worker, Load]:
        """Return the load of each worker, from the router's own tracking and the worker's
        metrics.
        """
        return self._router.tracker.loads

    def url_of(self, address: Address) -> str:
        """Return the URL of one of its addresses."""
        return self._settings.callers.url_of(address)

    def index(self) -> PredictiveIndexer:
        """Return the index of caches. Raises RouterError if the policy ignores caches."""
        if self._cache.index is None:
            raise RouterError(f"the policy {self._settings.policy} does not use caches")
        return self._cache.index

    def pending(self) -> int:
        """Return the number of requests that wait for a worker."""
        return len(self._wait_queue)

    def _scrape(self) -> bytes:
        """Return the metrics, with up-to-date gauges."""
        self.metrics.pending.set(self.pending())
        self._cache.scrape()
        loads = self.loads()
        for engine in self.fleet:
            load = loads[engine.worker]
            self.metrics.state(engine, load)
        return self.metrics.text()


def _connections(engine: Engine) -> int:
    """Return how many connections to an engine stay open in addition to its requests: one for
    checks, and those of its KV events.
    """
    return 1 + sum(1 + (replay is not None) for _, replay in engine.spec.feeds)


async def serve(settings: Settings, started: Callable[[Service], None]) -> None:
    """Run a router until SIGTERM or SIGINT, then drain. Raises RouterError or OSError."""
    raise_file_limit()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with Service(settings) as service:
        gc.collect()
        gc.freeze()  # these objects stay, so later collections need not visit them
        started(service)
        await stopping.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # a second signal ends the process at once
        log.info("stopping; running requests have %g s", settings.limits.drain_s)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` to its end. Signals are handled as by ``asyncio.run``."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
