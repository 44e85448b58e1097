# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A task that is done in the pool once, as soon as the pool is available."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from beluga.connectors.connection import Connection
from beluga.threads import Thread

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from beluga.connectors.connection import Attachment
    from beluga.connectors.settings import PoolSettings

PAUSE_S = 0.05


class RetryTask:
    """A thread with its own session, which repeats ``call`` until it returns true."""

    def __init__(
        self,
        settings: PoolSettings,
        *,
        name: str,
        doing: str,
        call: Callable[[Attachment], bool],
        logger: logging.Logger,
    ) -> None:
        self._connection = Connection(settings, name=name, engine="vllm", logger=logger)
        self._doing, self._call = doing, call
        self._done = threading.Event()
        self._closing = threading.Event()
        self._thread = Thread(target=self._run, name=f"beluga-{name}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the task is done. Returns whether it is."""
        return self._done.wait(timeout_s)

    def close(self) -> None:
        """Give the task up if it is not done."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._connection.wait(PAUSE_S) and self._connection.attempt(self._doing, self._call):
                self._done.set()
                break
            self._closing.wait(PAUSE_S)
        self._connection.close()
