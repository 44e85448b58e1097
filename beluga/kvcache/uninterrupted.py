# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Work that no interrupt may cut in two: a put between its grants and their end.

Python raises what a signal's handler raises (Ctrl-C's ``KeyboardInterrupt``) in the main thread, at
any point of its code. So the main thread's batches run in a thread of the cache's own, and the main
thread waits. The first interrupt is raised when the batch has ended, and has it dropped. The second
one is raised at once: the batch ends without the main thread, and gives back what it holds then.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

Left = Callable[[], bool]
"""Has whoever asked for the batch been interrupted? Then nothing of it may be published: its memory
may be used for something else."""


class _Batch:
    """One batch; ``ended`` is held until it is ``over``."""

    __slots__ = ("ended", "error", "left", "over", "result", "run")

    def __init__(self, run: Callable[[Left], int]) -> None:
        self.run, self.left, self.over, self.result = run, False, False, 0
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        self.ended.acquire()


_Queue = queue.SimpleQueue["_Batch | None"]


class Uninterrupted:
    """Runs batches one after the other; the thread is started for the first one of the main
    thread's. Other threads, which no signal interrupts, run their own."""

    def __init__(self) -> None:
        self._batches: _Queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def run(self, run: Callable[[Left], int]) -> int:
        """What ``run`` returns, or raises; its argument says whether to drop what it does."""
        main = threading.current_thread() is threading.main_thread()
        if not main or os.getpid() != self._pid:  # a forked child has not the thread
            return run(lambda: False)
        if self._thread is None:
            self._thread = _start(self._batches)
            weakref.finalize(self, self._batches.put, None)
        batch = _Batch(run)
        try:
            self._batches.put(batch)
            batch.ended.acquire()
        except BaseException:
            batch.left = True  # first: a second interrupt finds it done
            if not batch.over:  # else the lock may have been taken, just before the interrupt
                batch.ended.acquire()
            raise
        if batch.error is not None:
            raise batch.error
        return batch.result

    def close(self) -> None:
        """Wait for what is left of an interrupted batch. Twice is fine."""
        if self._thread is not None and os.getpid() == self._pid:
            self._batches.put(None)
            self._thread.join()
            self._thread = None


def _start(batches: _Queue) -> threading.Thread:
    # A daemon: at the interpreter's end it stands still, and holds the session's lock. What it had
    # granted goes when the process is proven gone.
    thread = threading.Thread(target=_work_off, args=(batches,), name="beluga-batches", daemon=True)
    thread.start()
    return thread


def _work_off(batches: _Queue) -> None:
    while (batch := batches.get()) is not None:
        _work(batch)
        del batch  # its memory is the caller's again


def _work(batch: _Batch) -> None:
    try:
        batch.result = batch.run(lambda: batch.left)
    except BaseException as error:  # the caller's to see, whatever it is
        batch.error = error
    finally:
        batch.over = True
        batch.ended.release()
