# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a service tells the manager that started it: systemd, or ``beluga serve --detach``.

The protocol is that of sd_notify(3): datagrams to the socket that ``NOTIFY_SOCKET`` names. Without
that variable nothing is told.
"""

from __future__ import annotations

import math
import os
import socket
import time

from beluga import config
from beluga.cli.output import say


class Manager:
    """The manager that started this process, if it asks to be told.

    ``look_s`` is how often the caller must look after its service, so that :meth:`alive` is called
    in time: a quarter of the manager's watchdog; or ``look_s_max``, if that is less or there is
    none.
    """

    def __init__(self, look_s_max: float) -> None:
        self._address = config.notify_socket()
        watchdog_s = config.watchdog_s()
        self._period_s = math.inf if watchdog_s is None else watchdog_s / 4
        self.look_s = min(look_s_max, self._period_s)
        self._told_s = -math.inf
        self._status = ""

    def ready(self, status: str) -> None:
        """Say that the service does what it was started for, and how. Only changes are told."""
        if status != self._status:
            first, self._status = not self._status, status
            self._tell(f"READY=1\nMAINPID={os.getpid()}\nSTATUS={status}", heard=first)

    def stopping(self) -> None:
        """Say that the process ends, as it was told."""
        self._tell("STOPPING=1\nSTATUS=stopping")

    def alive(self) -> None:
        """Say, not too often, that the service makes progress. The caller has just seen it."""
        now = time.monotonic()
        if math.isfinite(self._period_s) and now - self._told_s >= self._period_s:
            self._told_s = now
            self._tell("WATCHDOG=1")

    def _tell(self, text: str, *, heard: bool = False) -> None:
        """Send the words; with ``heard`` say so if nobody can hear them. `beluga serve --detach`
        listens only for the first ones.
        """
        if self._address is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.setblocking(False)
            try:
                told.sendto(text.encode(), self._address)
            except OSError as error:
                if heard:
                    say(f"NOTIFY_SOCKET: {error}")
