# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Threads that run C: they have to be threads of the kernel, and their callers wait for those that
work on memory which is unmapped next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import BuiltinFunctionType

from beluga.errors import GreenThreadsError

_POLL_S = 0.001


def refuse_green_threads() -> None:
    """Raise GreenThreadsError if gevent or eventlet made greenlets of Python's threads. All
    greenlets share one thread of the kernel: a loop in C on one of them blocks them all forever.
    """
    if not isinstance(threading.get_ident, BuiltinFunctionType):
        module = threading.get_ident.__module__.partition(".")[0]
        raise GreenThreadsError(
            f"{module} makes greenlets of this process's threads, and Beluga needs a thread; start "
            "the server as a process of its own ('beluga serve'), or patch with thread=False"
        )


class Thread(threading.Thread):
    """A thread of the kernel. Its start raises GreenThreadsError where there are none."""

    def start(self) -> None:
        refuse_green_threads()
        super().start()


def wait_for(threads: Sequence[threading.Thread]) -> None:
    """Wait until the threads have ended, even if Ctrl-C is pressed repeatedly. It is raised
    afterwards.

    A thread whose ``join`` was interrupted counts as ended in CPython 3.9 to 3.12, although it
    still runs. Therefore the list of all threads is checked.
    """
    interrupt: BaseException | None = None
    running = True
    while running:
        try:
            running = not set(threading.enumerate()).isdisjoint(threads)
            if running:
                time.sleep(_POLL_S)
        except (KeyboardInterrupt, SystemExit) as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
