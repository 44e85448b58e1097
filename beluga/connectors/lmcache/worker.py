# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A worker thread with its own connection, for calls that must not wait for the pool."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from beluga.connectors.connection import Connection

if TYPE_CHECKING:
    import logging

    from beluga.connectors.settings import PoolSettings

Job: TypeAlias = Callable[[Connection], None]


class Worker:
    """Does jobs one after the other, in the order in which they were submitted.

    A job delivers its own result and must not raise; an exception is logged.
    """

    def __init__(self, settings: PoolSettings, *, name: str, logger: logging.Logger) -> None:
        self.connection = Connection(settings, name=name, engine="lmcache", logger=logger)
        self._logger = logger
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{name}-jobs", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job and return at once."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the submitted jobs, then end the session."""
        self._jobs.put(None)
        self._thread.join()
        self.connection.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job(self.connection)
            except Exception:
                self._logger.exception("a job of beluga's failed")
