# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A connection: a session with the pool that reconnects. Every failure is a miss.

An engine must start, run and stop whether or not its pool is available. A Connection attaches on
its own thread, repeatedly; while it is not attached, every attempt fails at once. A failed attempt
detaches: the engine has waited up to ``timeout_ms`` for that one call, and waits for no other call
until the thread has attached again. (A server that is replaced within that time is not a failure,
because the session finds its successor within the call.)
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

from beluga.connectors.settings import LINK_OFF
from beluga.errors import BelugaError, PoolError, TransferError, is_of_request
from beluga.kvcache import KVCache, Namespace
from beluga.limit import LogLimit, and_more, kind_of
from beluga.pool import Pool
from beluga.rpc import KINDS, Client
from beluga.threads import Thread
from beluga.transfer import (
    IoHandle,
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


class Attachment:
    """A pool, a session, its caches and their I/O handle at the host's link, from attaching to the
    first failure. ``read_class`` is the class of gets on the link.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        read_class: TransferClass = TransferClass.ONBOARD,
        logger: logging.Logger | None = None,
    ) -> None:
        self._settings, self._read_class = settings, read_class
        self._threads = settings.load_threads or default_threads()
        timeout_s = settings.timeout_ms / 1000
        paths = [path for path in (settings.pool or "").split(":") if path]
        self.pool = Pool.open(paths) if paths else Pool.mount()
        try:
            self.client = Client(self.pool, host=settings.host, timeout_s=timeout_s)
        except BaseException:
            self.pool.close()
            raise
        self._caches: OrderedDict[bytes, KVCache] = OrderedDict()  # the last used one is last
        self.record_pins: dict[bytes, tuple[bytes, Pins]] = {}  # of the records module
        self.io_handle = self._placed(logger or logging.getLogger(__name__))

    def _placed(self, logger: logging.Logger) -> IoHandle | None:
        """Register with the host's link. Returns None if the link cannot be used, because copies
        must never wait for it.
        """
        if self._settings.link == LINK_OFF:
            return None
        try:
            return IoHandle(host_link(self.pool, parse_settings(self._settings.link)))
        except (TransferError, PoolError, OSError) as error:
            logger.warning("beluga: copies are not throttled: %s", error)
            return None

    @property
    def onboard_s(self) -> float:
        """How long a request waits for blocks from a lower tier, in seconds."""
        return self._settings.onboard_ms / 1000

    def transfer_stats(self) -> dict[TransferClass, TransferStats]:
        """Return what the link scheduler admitted for this session, by class."""
        if self.io_handle is None:
            return {}
        return {kind: self.io_handle.transfer_stats(kind) for kind in TransferClass}

    def cache(
        self, namespace: Namespace, engine: Callable[[Pool], CopyEngine | None] = lambda _: None
    ) -> KVCache:
        """Return the cache of a namespace on this session. ``engine`` is called with the pool and
        returns a copy engine, or None for blocks in host memory. The cache is open until
        CACHES_MAX other namespaces were used.
        """
        cache = self._caches.get(namespace.digest)
        if cache is None:
            driver = engine(self.pool)
            cache = KVCache(
                self.client,
                namespace=namespace,
                check_checksums=self._settings.check_checksums,
                timeout_s=self.client.timeout_s,
                threads=self._threads,
                engine=driver or self._settings.engine,
                link=self.io_handle,
                read_class=self._read_class,
                onboard=self.onboard_s > 0,
            )
            self._caches[namespace.digest] = cache
            if len(self._caches) > CACHES_MAX:
                self._caches.popitem(last=False)[1].close()
        self._caches.move_to_end(namespace.digest)
        return cache

    def close(self) -> None:
        """End the session and unmap the pool, after the running call."""
        self.pool.close()
        for cache in self._caches.values():
            cache.close()
        if self.io_handle is not None:
            self.io_handle.close()
            self.io_handle.link.close()


class Connection:
    """Attaches to the pool, stays attached, and returns None on failures. For one thread only.

    ``name`` appears in warnings. ``prefault`` touches the whole pool after attaching, on the
    connection's thread, so that the first copies are as fast as later ones. ``read_class`` is the
    class of gets on the host's link to the pool. ``engine`` is the kind of client in the server's
    metrics, one of :data:`beluga.rpc.KINDS`.
    """

    def __init__(  # noqa: PLR0913  keyword-only but the first
        self,
        settings: PoolSettings,
        *,
        name: str,
        engine: str = KINDS[0],
        logger: logging.Logger,
        prefault: bool = False,
        read_class: TransferClass = TransferClass.ONBOARD,
    ) -> None:
        self.failure_count = 0
        self._settings, self._engine = settings, engine
        self._name, self._logger, self._prefault = name, logger, prefault
        self._read_class = read_class
        self._transfer_stats = {
            kind: TransferStats() for kind in TransferClass
        }  # of ended sessions
        self._attachment: Attachment | None = None
        self._broken: list[Attachment] = []  # the thread closes these, because closing may wait
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._tried = False  # whether the first attempt to attach has ended
        self._limit = LogLimit()
        self._thread = Thread(target=self._keep, name=f"beluga-{name}", daemon=True)
        self._thread.start()

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
        with self._changed:
            self._changed.wait_for(lambda: self._attachment is not None or self._tried, SETTLE_S)
            return self._attachment is not None

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
                with self._changed:
                    if self._attachment is attachment:
                        self._attachment = None
                        self._broken.append(attachment)
                        self._changed.notify_all()
            self._fail(doing, error, started_s)
        return None

    def transfer_stats(self) -> dict[TransferClass, TransferStats]:
        """Return what the link scheduler admitted for this session and earlier ones, by class, and
        how long the pieces waited.
        """
        with self._lock:
            now = {} if self._attachment is None else self._attachment.transfer_stats()
            ended = [attachment.transfer_stats() for attachment in self._broken]
            return {
                kind: functools.reduce(
                    TransferStats.plus, (part[kind] for part in (now, *ended) if part), before
                )
                for kind, before in self._transfer_stats.items()
            }

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop copies in the meantime: a running one ends at its next piece and none starts. Each
        raises TransferCancelledError.
        """
        attachment = self._attachment
        io_handle = None if attachment is None else attachment.io_handle
        if io_handle is None:
            yield
            return
        io_handle.stop()
        try:
            yield
        finally:
            io_handle.resume()

    def close(self) -> None:
        """End the session."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

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

    def _keep(self) -> None:
        """Attach, wait until the attachment has failed, and repeat. The thread's function."""
        while not self._closing:
            self._end_broken()
            started_s = time.monotonic()
            try:
                attachment = Attachment(
                    self._settings, read_class=self._read_class, logger=self._logger
                )
                attachment.client.report.kind = self._engine
            except (BelugaError, OSError) as error:
                self._fail("attaching to the pool", error, started_s)
                with self._changed:
                    self._tried = True
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._attachment = attachment
                    self._changed.notify_all()
                if self._prefault:
                    attachment.pool.prefault()
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._broken)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, self._settings.retry_s)
        with self._changed:
            if self._attachment is not None:
                self._broken.append(self._attachment)
                self._attachment = None
        self._end_broken()

    def _end_broken(self) -> None:
        while self._broken:
            ended = self._broken[-1]
            ended.pool.close()  # no thread copies any more
            with self._lock:
                for kind, stats in ended.transfer_stats().items():
                    self._transfer_stats[kind] = self._transfer_stats[kind].plus(stats)
                self._broken.remove(ended)
            ended.close()
