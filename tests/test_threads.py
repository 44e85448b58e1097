# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Waiting for threads, with interrupts."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from beluga.threads import wait_for


def test_a_thread_whose_join_was_interrupted_is_waited_for() -> None:
    """CPython 3.9 to 3.12 mark such a thread as ended: a second join returns at once."""
    ended = threading.Event()

    def work() -> None:
        for _ in range(2):  # the first one interrupts the join, the second one wait_for
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            thread.join()
        finally:
            wait_for([thread])
    assert ended.is_set()
    assert thread not in threading.enumerate()


def test_threads_that_have_ended_or_never_began_are_not_waited_for() -> None:
    over, never = threading.Thread(target=int), threading.Thread(target=int)
    over.start()
    over.join()
    wait_for([over, never])
