# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Threads that work on their caller's memory. The caller always waits for them, because it unmaps
that memory next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from beluga.threads import wait_for

_POLL_S = 0.05


def run_together(works: Sequence[Callable[[], None]], stop: Callable[[], None]) -> None:
    """Run each work on its own thread, until all of them have ended.

    Ctrl-C in the meantime calls ``stop``. After that, a running work has to end soon, and one that
    has not begun must not access the caller's memory.
    """
    threads = [threading.Thread(target=work) for work in works]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # a signal that another thread got does not end a join
                thread.join(_POLL_S)
    except BaseException:
        stop()
        raise
    finally:
        wait_for(threads)
