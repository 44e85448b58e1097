# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A session with the pool that comes and goes: whatever fails is a miss.

An engine must start, run and stop whether or not its pool is there. A Connection attaches in a
thread of its own, again and again; while it is not attached, every attempt fails at once. An
attempt that fails detaches: the engine has waited for that one call, ``timeout_ms`` at most, and
waits for none of the next until the thread has attached anew. (A server that is replaced in less
than that is not a failure: the session finds its successor within the call.)
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from beluga.connectors.settings import LINK_OFF
from beluga.errors import BelugaError, CacheError, PoolError, QuotaError, TransferError
from beluga.kvcache import KVCache, Namespace
from beluga.pool import Pool
from beluga.rpc import Client
from beluga.transfer import (
    Carried,
    Place,
    TransferClass,
    choose,
    default_threads,
    host_link,
    settings_said,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from beluga.connectors.settings import PoolSettings
    from beluga.transfer import Engine

T = TypeVar("T")

WARNING_INTERVAL_S = 60.0
_CALL_ERRORS = (CacheError, QuotaError)  # of one call; the session is as good as before


class Attachment:
    """A pool, a session, its caches and their place at the host's link, from attaching to the first
    failure. ``read_class`` is what gets are on the link."""

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
            choose(self.pool, settings.engine, self._threads).close()  # what caches need is kept
            self.client = Client(self.pool, host=settings.host, timeout_s=timeout_s)
        except BaseException:
            self.pool.close()
            raise
        self._caches: dict[bytes, KVCache] = {}
        self.place = self._placed(logger or logging.getLogger(__name__))

    def _placed(self, logger: logging.Logger) -> Place | None:
        """A link that cannot be used is not waited for: what it is for is to be quick."""
        if self._settings.link == LINK_OFF:
            return None
        try:
            return Place(host_link(self.pool, settings_said(self._settings.link)))
        except (TransferError, PoolError, OSError) as error:
            logger.warning("beluga: copies are not scheduled: %s", error)
            return None

    def carried(self) -> dict[TransferClass, Carried]:
        """What was let onto the link for this session, by class."""
        if self.place is None:
            return {}
        found = {kind: self.place.carried(kind) for kind in TransferClass}
        for cache in self._caches.values():
            more = cache.carried(own=True)  # by engines, each with a place of its own
            found = {kind: found[kind].plus(more[kind]) for kind in TransferClass}
        return found

    def cache(
        self, namespace: Namespace, engine: Callable[[Pool], Engine | None] = lambda _: None
    ) -> KVCache:
        """The cache of a namespace on this session; ``engine``, given the pool, makes who copies
        for it, or None if its blocks lie in host memory."""
        found = self._caches.get(namespace.digest)
        if found is None:
            driver = engine(self.pool)
            found = KVCache(
                self.client,
                namespace=namespace,
                check_checksums=self._settings.check_checksums,
                timeout_s=self.client.timeout_s,
                threads=self._threads,
                engine=driver or self._settings.engine,
                link=self.place,
                read_class=self._read_class,
            )
            self._caches[namespace.digest] = found
        return found

    def close(self) -> None:
        """End the session and unmap the pool; waits for a call that is under way."""
        self.pool.close()
        for cache in self._caches.values():
            cache.close()
        if self.place is not None:
            self.place.close()
            self.place.link.close()


class Connection:
    """Attaches to the pool, stays attached, and says None where it cannot. One user thread.

    ``name`` is what warnings call it. ``prefault``: touch the whole pool after attaching, in the
    connection's own thread, so that the first copies are as fast as the others. ``read_class`` is
    what gets are on the host's link to the pool.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        name: str,
        logger: logging.Logger,
        prefault: bool = False,
        read_class: TransferClass = TransferClass.ONBOARD,
    ) -> None:
        self.failure_count = 0
        self._settings = settings
        self._name, self._logger, self._prefault = name, logger, prefault
        self._read_class = read_class
        self._carried = {kind: Carried() for kind in TransferClass}  # for sessions that are over
        self._attachment: Attachment | None = None
        self._broken: list[Attachment] = []  # to be closed by the thread: that may wait
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._warned_s = -WARNING_INTERVAL_S
        self._unsaid = 0
        self._thread = threading.Thread(target=self._keep, name=f"beluga-{name}", daemon=True)
        self._thread.start()

    @property
    def attached(self) -> bool:
        """Whether an attempt would be made now."""
        return self._attachment is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait until the first attaching has succeeded, or the time is over; which of the two."""
        with self._changed:
            return self._changed.wait_for(lambda: self._attachment is not None, timeout_s)

    def attempt(self, doing: str, call: Callable[[Attachment], T]) -> T | None:
        """What ``call`` returns; None if the pool is not there, or failed ``call``.

        ``doing`` stands in the warning, of which there is one a minute; it says why, and after how
        long.
        """
        attachment = self._attachment
        if attachment is None:
            return None
        started_s = time.monotonic()
        try:
            return call(attachment)
        except _CALL_ERRORS as error:
            self._fail(doing, error, started_s)
        except (BelugaError, OSError) as error:
            with self._changed:
                if self._attachment is attachment:
                    self._attachment = None
                    self._broken.append(attachment)
                    self._changed.notify_all()
            self._fail(doing, error, started_s)
        return None

    def carried(self) -> dict[TransferClass, Carried]:
        """What the host's link let on for this session and those before it, by class, and how long
        its pieces waited for that."""
        with self._lock:
            now = {} if self._attachment is None else self._attachment.carried()
            ended = [attachment.carried() for attachment in self._broken]
            return {
                kind: functools.reduce(
                    Carried.plus, (part[kind] for part in (now, *ended) if part), before
                )
                for kind, before in self._carried.items()
            }

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile a copy that is under way ends at its next piece, and none begins: each raises
        TransferCancelledError."""
        attachment = self._attachment
        place = None if attachment is None else attachment.place
        if place is None:
            yield
            return
        place.stop()
        try:
            yield
        finally:
            place.resume()

    def close(self) -> None:
        """Give the session back."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _fail(self, doing: str, error: Exception, started_s: float) -> None:
        self.failure_count += 1
        now = time.monotonic()
        if now - self._warned_s < WARNING_INTERVAL_S:
            self._unsaid += 1
            return
        took = f"after {1000 * (now - started_s):.0f} ms"
        more = f", and {self._unsaid} more since the last warning" if self._unsaid else ""
        self._logger.warning("beluga %s: %s: %s (%s%s)", self._name, doing, error, took, more)
        self._warned_s, self._unsaid = now, 0

    def _keep(self) -> None:
        """The thread: attach, wait until that has failed, again."""
        while not self._closing:
            self._end_broken()
            started_s = time.monotonic()
            try:
                attachment = Attachment(
                    self._settings, read_class=self._read_class, logger=self._logger
                )
            except (BelugaError, OSError) as error:
                self._fail("attaching to the pool", error, started_s)
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
            ended.pool.close()  # nobody copies any more
            with self._lock:
                for kind, carried in ended.carried().items():
                    self._carried[kind] = self._carried[kind].plus(carried)
                self._broken.remove(ended)
            ended.close()
