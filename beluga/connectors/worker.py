# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A worker thread with its own connection, for engines whose calls must not block on the pool."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from beluga.connectors.connection import Connection
from beluga.threads import Thread

if TYPE_CHECKING:
    import logging

    from beluga.connectors.settings import PoolSettings

T = TypeVar("T")
Job: TypeAlias = Callable[[Connection], object]


class JobWorker:
    """Executes jobs sequentially, in order of submission.

    A job delivers its own result and must not raise: its return value is dropped, and an exception
    is logged.
    """

    def __init__(
        self, settings: PoolSettings, *, name: str, engine: str, logger: logging.Logger
    ) -> None:
        self.connection = Connection(settings, name=name, engine=engine, logger=logger)
        self._logger = logger
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._run, name=f"{name}-jobs", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """Queue a job and return at once. Returns False after :meth:`close`: the job never runs."""
        with self._lock:
            if not self._closed:
                self._jobs.put(job)
            return not self._closed

    def call(self, doing: Callable[[Connection], T]) -> T | None:
        """Execute a call after the submitted jobs, and wait for its result. Returns None after
        :meth:`close`, and if it raises. From within a job, it executes the call at once.
        """
        if threading.current_thread() is self._thread:
            return doing(self.connection)
        done, results = threading.Event(), list[T]()

        def job(connection: Connection) -> None:
            try:
                results.append(doing(connection))
            finally:
                done.set()

        if not self.submit(job):
            return None
        done.wait()
        return results[0] if results else None

    def close(self) -> None:
        """Finish the submitted jobs, then end the session. Later calls have no effect."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join()
        self.connection.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job(self.connection)
            except Exception:
                self._logger.exception("a job of beluga's failed")
