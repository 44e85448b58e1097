# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The services in a server's process, and its notifications to a service manager: systemd, or
``--detach``. The protocol is that of sd_notify(3).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from typing import Protocol

from beluga import config
from beluga.cli.output import print_note
from beluga.errors import BelugaError


class Manager:
    """The process manager that started this process, if it expects notifications.

    ``look_s`` is the interval at which the caller must check its service, so that it calls
    :meth:`alive` in time: a quarter of the manager's watchdog timeout, at most ``look_s_max``.
    """

    def __init__(self, look_s_max: float) -> None:
        self._address = config.notify_socket()
        watchdog_s = config.watchdog_s()
        self._period_s = math.inf if watchdog_s is None else watchdog_s / 4
        self.look_s = min(look_s_max, self._period_s)
        self._notified_s = -math.inf
        self._status = ""

    def ready(self, status: str) -> None:
        """Report that the service is ready, with a status text. Only changes are sent."""
        if status != self._status:
            first, self._status = not self._status, status
            self._notify(f"READY=1\nMAINPID={os.getpid()}\nSTATUS={status}", logged=first)

    def stopping(self) -> None:
        """Report that the process is stopping on request."""
        self._notify("STOPPING=1\nSTATUS=stopping")

    def alive(self) -> None:
        """Report, rate-limited, that the service makes progress. The caller has just checked it."""
        now = time.monotonic()
        if math.isfinite(self._period_s) and now - self._notified_s >= self._period_s:
            self._notified_s = now
            self._notify("WATCHDOG=1")

    def _notify(self, text: str, *, logged: bool = False) -> None:
        """Send a datagram; with ``logged`` log a failure. `beluga serve --detach` receives only the
        first one.
        """
        if self._address is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.setblocking(False)
            try:
                notifier.sendto(text.encode(), self._address)
            except OSError as error:
                if logged:
                    print_note(f"NOTIFY_SOCKET: {error}")


_logger = logging.getLogger(__name__)

_PERIOD_S = 2.0  # interval of attempts to start a service


class RestartableService(Protocol):
    """A service that may be started again after a failed start."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Services:
    """The services of one server.

    With ``patient``, a service that fails to start does not end the server; :meth:`look_after`
    retries it. This is for a takeover from a hanging server, which may still hold a port or the
    pool's last lanes.
    """

    def __init__(self, services: Sequence[RestartableService], *, patient: bool) -> None:
        self._services, self._patient = tuple(services), patient
        # Services that have not started yet, and the reason
        self._late: dict[RestartableService, str] = {}
        self._tried_s = 0.0

    def start(self) -> None:
        """Start all services. Raises their errors, unless this is patient."""
        for service in self._services:
            if self._patient:
                self._try(service)
            else:
                service.start()

    def look_after(self) -> None:
        """Retry failed starts at intervals. Call this often."""
        if not self._late or time.monotonic() - self._tried_s < _PERIOD_S:
            return
        for service in tuple(self._late):
            self._try(service)

    def stop(self) -> None:
        """Stop all services in reverse order."""
        for service in reversed(self._services):
            service.stop()

    def _try(self, service: RestartableService) -> None:
        cause = self._late.get(service)
        self._tried_s = time.monotonic()
        try:
            service.start()
        except BelugaError as error:
            self._late[service] = str(error)
            if cause != str(error):
                _logger.warning(
                    "the pool is served without a service, whose start will be retried: %s", error
                )
            return
        if self._late.pop(service, None) is not None:
            _logger.warning("the service has now started; before: %s", cause)
