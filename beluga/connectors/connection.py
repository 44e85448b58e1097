# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A connection: a session with the pool that reconnects. Every failure is a miss.

An engine must start, run and stop whether or not its pool is available. A connection attaches in
the background, repeatedly; while it is not attached, every attempt fails at once. A failed attempt
detaches: the engine has waited up to ``timeout_ms`` for that one call, and waits for no other call
until the connection is attached again. (A server that is replaced within that time is not a
failure, because the session finds its successor within the call.)

All threads of a process share one connection. It has two workers, so that what a request waits for
never waits for the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

from beluga.connectors.settings import LINK_OFF
from beluga.errors import (
    BelugaError,
    ForkedSessionError,
    PoolError,
    TransferError,
    is_of_request,
)
from beluga.kvcache import KVCache, Namespace, OpTicket, OpWorker
from beluga.limit import LogLimit, and_more, kind_of
from beluga.pool import Pool
from beluga.rpc import KINDS, Client
from beluga.transfer import (
    IoHandle,
    Link,
    TransferClass,
    TransferStats,
    default_threads,
    host_link,
    parse_settings,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from beluga.connectors.settings import PoolSettings
    from beluga.index import Pins
    from beluga.transfer import CopyEngine

T = TypeVar("T")

CACHES_MAX = 256  # per session: LMCache's namespaces have the salts that its clients choose
SETTLE_S = 10.0  # longest wait of a starting engine
NICENESS = 10  # of the background: the engine's threads get about ten times the CPU share
_PREFAULT_BYTES = 1 << 30  # at a time, so that saves need not wait for the whole pool


def _cpu(_: Pool) -> None:
    return None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Side:
    """A kind of copies over a connection. Those of one side can be stopped, and are in the class
    ``read_class`` if they are gets. ``engine`` is called with the pool, and returns a copy engine,
    or None for blocks in host memory.
    """

    engine: Callable[[Pool], CopyEngine | None] = _cpu
    read_class: TransferClass = TransferClass.ONBOARD


HOST = Side()
"""Copies between the pool and host memory."""


class Attachment:
    """A pool, a session and its caches, from attaching to the first failure. Thread-safe."""

    def __init__(self, settings: PoolSettings, *, logger: logging.Logger | None = None) -> None:
        self._settings = settings
        self._threads = settings.load_threads or default_threads()
        timeout_s = settings.timeout_ms / 1000
        paths = [path for path in (settings.pool or "").split(":") if path]
        self.pool = Pool.open(paths) if paths else Pool.mount()
        try:
            self.client = Client(self.pool, host=settings.host, timeout_s=timeout_s)
        except BaseException:
            self.pool.close()
            raise
        self._lock = threading.Lock()
        # The last used one is last.
        self._caches: OrderedDict[tuple[bytes, Side], KVCache] = OrderedDict()
        self.record_lock = threading.Lock()  # guards what follows, of the records module
        self.record_pins: dict[bytes, tuple[bytes, Pins]] = {}
        self._link = self._placed(logger or logging.getLogger(__name__))
        self._handles: dict[Side, IoHandle] = {}

    def _placed(self, logger: logging.Logger) -> Link | None:
        """Return the host's link, or None if it cannot be used, because copies must never wait for
        it.
        """
        if self._settings.link == LINK_OFF:
            return None
        try:
            return host_link(self.pool, parse_settings(self._settings.link))
        except (TransferError, PoolError, OSError) as error:
            logger.warning("beluga: copies are not throttled: %s", error)
            return None

    @property
    def onboard_s(self) -> float:
        """How long a request waits for blocks from a lower tier, in seconds."""
        return self._settings.onboard_ms / 1000

    def transfer_stats(self) -> dict[TransferClass, TransferStats]:
        """Return what the link scheduler admitted for this session, by class."""
        handles = list(self._handles.values())
        return {
            kind: functools.reduce(
                TransferStats.plus, (h.transfer_stats(kind) for h in handles), TransferStats()
            )
            for kind in TransferClass
        }

    def handle(self, side: Side) -> IoHandle | None:
        """Return the handle of a side at the host's link, or None without a link."""
        handle = self._handles.get(side)
        if handle is None and self._link is not None:
            handle = self._handles.setdefault(side, IoHandle(self._link))
        return handle

    def cache(self, namespace: Namespace, side: Side = HOST) -> KVCache:
        """Return the cache of a namespace on this session. It is open until CACHES_MAX other ones
        were used.
        """
        with self._lock:
            cache = self._caches.get((namespace.digest, side))
            if cache is None:
                cache = KVCache(
                    self.client,
                    namespace=namespace,
                    check_checksums=self._settings.check_checksums,
                    timeout_s=self.client.timeout_s,
                    threads=self._threads,
                    engine=side.engine(self.pool) or self._settings.engine,
                    link=self.handle(side),
                    read_class=side.read_class,
                    onboard=self.onboard_s > 0,
                )
                self._caches[namespace.digest, side] = cache
                if len(self._caches) > CACHES_MAX:
                    self._caches.popitem(last=False)[1].close()
            self._caches.move_to_end((namespace.digest, side))
        return cache

    def close(self) -> None:
        """End the session and unmap the pool, after the running calls."""
        self.pool.close()
        for cache in self._caches.values():
            cache.close()
        for handle in self._handles.values():
            handle.close()
        if self._link is not None:
            self._link.close()


class Connection:
    """Attaches to the pool, stays attached, and returns None on failures. Thread-safe.

    ``name`` appears in warnings. ``prefault`` touches the whole pool after attaching, in the
    background, so that the first copies are as fast as later ones. ``engine`` is the kind of client
    in the server's metrics, one of :data:`beluga.rpc.KINDS`.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        name: str,
        engine: str = KINDS[0],
        logger: logging.Logger,
        prefault: bool = False,
    ) -> None:
        self.failure_count = 0
        self._settings, self._engine = settings, engine
        self._name, self._logger, self._prefaults = name, logger, prefault
        self._transfer_stats = {
            kind: TransferStats() for kind in TransferClass
        }  # of ended sessions
        self._attachment: Attachment | None = None
        self._broken: list[Attachment] = []  # to be closed in the background: closing may wait
        self._changed = threading.Condition(threading.Lock())
        self._closing = False
        self._limit = LogLimit()
        self._urgent, self._background = OpWorker(), OpWorker(niceness=NICENESS)
        self._first = self._background.submit(self._attach)

    @property
    def attached(self) -> bool:
        """Whether the connection is attached now."""
        return self._attachment is not None

    def has(self, attachment: Attachment) -> bool:
        """Whether this attachment is the current one."""
        return self._attachment is attachment

    def wait(self, timeout_s: float) -> bool:
        """Wait until the connection is attached. Returns False after ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._attachment is not None, timeout_s)

    def settle(self) -> bool:
        """Wait until the first attempt to attach has ended, at most SETTLE_S seconds. Returns
        whether the connection is attached.

        An engine calls this at its start, so that its first prompt does not miss because the
        session is not there yet. A server that does not reply costs ``timeout_ms``.
        """
        with contextlib.suppress(TimeoutError):
            self._first.wait(SETTLE_S)
        return self.attached

    def attempt(self, doing: str, call: Callable[[Attachment], T]) -> T | None:
        """Return the result of ``call``, or None if the pool is not available or ``call`` failed.

        ``doing`` appears in the warning, which has the reason and the duration of the call: the
        first of each kind is logged at once, then at most one per minute. Only an error of the pool
        detaches. Other exceptions, such as torch's when an accelerator has no free memory, are not
        raised either: the engine can compute what it does not get, but cannot continue without the
        calling thread.
        """
        attachment = self._attachment
        if attachment is None:
            return None
        started_s = time.monotonic()
        try:
            return call(attachment)
        except Exception as error:
            if isinstance(error, (BelugaError, OSError)) and not is_of_request(error):
                self._detach(attachment)
            self._fail(doing, error, started_s)
        return None

    def submit(self, call: Callable[[OpTicket[T]], T], *, urgent: bool) -> OpTicket[T]:
        """Queue ``call`` for the worker of what a request waits for (``urgent``), or for the
        background's, and return at once. Each worker executes its calls in order.

        ``call`` gets its ticket, and makes attempts. An exception is logged. After :meth:`close`
        the ticket has ended with an RpcError.
        """

        def logged(ticket: OpTicket[T]) -> T:
            try:
                return call(ticket)
            except Exception:
                self._logger.exception("an operation of beluga's failed")
                raise

        return (self._urgent if urgent else self._background).submit(logged)

    def finish(self, call: Callable[[], T], *, urgent: bool) -> T | None:
        """Execute a call after the submitted ones, and wait for its result. Returns None after
        :meth:`close`, and if it raises. From within a call of that worker, it is executed at once.
        """
        worker = self._urgent if urgent else self._background
        if worker.is_current:
            return call()
        try:
            return self.submit(lambda _: call(), urgent=urgent).wait()
        except Exception:
            return None

    def transfer_stats(self) -> dict[TransferClass, TransferStats]:
        """Return what the link scheduler admitted for this session and earlier ones, by class, and
        how long the pieces waited.
        """
        with self._changed:
            sessions = [*self._broken, *([self._attachment] if self._attachment else [])]
            parts = [session.transfer_stats() for session in sessions]
            return {
                kind: functools.reduce(TransferStats.plus, (part[kind] for part in parts), before)
                for kind, before in self._transfer_stats.items()
            }

    @contextlib.contextmanager
    def stopped(self, side: Side) -> Iterator[None]:
        """Stop the copies of a side in the meantime: a running one ends at its next piece and none
        starts. Each raises TransferCancelledError.
        """
        attachment = self._attachment
        handle = None if attachment is None else attachment.handle(side)
        if handle is None:
            yield
            return
        handle.stop()
        try:
            yield
        finally:
            handle.resume()

    def close(self) -> None:
        """Execute the submitted calls, and end the session. Idempotent."""
        with self._changed:
            self._closing = True
        self._urgent.close()
        self._background.close()
        with self._changed:
            if self._attachment is not None:
                self._broken.append(self._attachment)
                self._attachment = None
        self._end_broken()

    def _detach(self, attachment: Attachment) -> None:
        with self._changed:
            if self._attachment is not attachment:
                return
            self._attachment = None
            self._broken.append(attachment)
        with contextlib.suppress(ForkedSessionError):
            self._background.submit(self._attach, after_s=self._settings.retry_s)

    def _fail(self, doing: str, error: Exception, started_s: float) -> None:
        self.failure_count += 1
        suppressed = self._limit.passes(doing, kind_of(error))
        if suppressed is None:
            return
        took = f"after {1000 * (time.monotonic() - started_s):.0f} ms"
        expected = isinstance(error, (BelugaError, OSError))
        self._logger.warning(
            "beluga %s: %s: %s (%s)%s", self._name, doing, error if expected else repr(error), took,
            and_more(suppressed), exc_info=None if expected else error,
        )  # fmt: skip

    def _attach(self, _: OpTicket[None]) -> None:
        """End the sessions that have failed, and attach; if that fails, try again later."""
        self._end_broken()
        if self._closing:
            return
        started_s = time.monotonic()
        try:
            attachment = Attachment(self._settings, logger=self._logger)
            attachment.client.report.kind = self._engine
        except (BelugaError, OSError) as error:
            self._fail("attaching to the pool", error, started_s)
            self._background.submit(self._attach, after_s=self._settings.retry_s)
            return
        with self._changed:
            self._attachment = attachment
            self._changed.notify_all()
        if self._prefaults:
            self._background.submit(functools.partial(self._prefault, attachment, 0))

    def _prefault(self, attachment: Attachment, start: int, _: OpTicket[None]) -> None:
        """Touch a part of the pool, and the next one after what was submitted meanwhile."""
        end = start + _PREFAULT_BYTES
        if self._closing or not self.has(attachment):
            return
        attachment.pool.prefault(start, _PREFAULT_BYTES)
        if end < attachment.pool.geometry.size:
            self._background.submit(functools.partial(self._prefault, attachment, end))

    def _end_broken(self) -> None:
        while self._broken:
            ended = self._broken[-1]
            ended.pool.close()  # no thread copies any more
            with self._changed:
                for kind, stats in ended.transfer_stats().items():
                    self._transfer_stats[kind] = self._transfer_stats[kind].plus(stats)
                self._broken.remove(ended)
            ended.close()
