# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Notifications of a service to its manager: systemd, or ``beluga serve --detach``.

The protocol is that of sd_notify(3): datagrams to the socket in ``NOTIFY_SOCKET``. Without that
variable, nothing is sent.
"""

from __future__ import annotations

import math
import os
import socket
import time

from beluga import config
from beluga.cli.output import print_note


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
