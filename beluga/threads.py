# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Waiting for threads that work on memory which their caller unmaps next."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

_POLL_S = 0.001


def wait_for(threads: Sequence[threading.Thread]) -> None:
    """Wait until the threads have ended, however often Ctrl-C comes. It is raised afterwards.

    A thread whose ``join`` was interrupted counts as ended in CPython 3.9 to 3.12, although it
    still runs. Whether it runs is therefore seen in the list of all threads.
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
