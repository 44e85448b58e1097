# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Run a batch where no interrupt can stop it between its grants and their end.

Python raises the exception of a signal's handler (``KeyboardInterrupt`` for Ctrl-C) in the main
thread, at any point of its code. So the main thread's batches run in a thread that belongs to the
cache, and the main thread waits. The first interrupt drops the batch, and is raised when the batch
has ended. The second one is raised at once: the batch then ends without the main thread, and gives
back what it holds.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

Left = Callable[[], bool]
"""Has the caller of the batch been interrupted? If so, nothing of the batch may be published,
because its memory may be used for something else."""


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
    """Runs batches one after the other.

    The thread is started for the first batch of the main thread. Signals do not interrupt other
    threads, so those run their own batches.
    """

    def __init__(self) -> None:
        self._batches: _Queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def run(self, run: Callable[[Left], int]) -> int:
        """Call ``run`` and return its result; its argument says whether to drop the batch."""
        main = threading.current_thread() is threading.main_thread()
        if not main or os.getpid() != self._pid:  # a forked child does not have the thread
            return run(lambda: False)
        if self._thread is None:
            self._thread = _start(self._batches)
            weakref.finalize(self, self._batches.put, None)
        batch = _Batch(run)
        try:
            self._batches.put(batch)
            batch.ended.acquire()
        except BaseException:
            batch.left = True  # first, so that a second interrupt finds it set
            if not batch.over:  # else this thread may have taken the lock just before the interrupt
                batch.ended.acquire()
            raise
        if batch.error is not None:
            raise batch.error
        return batch.result

    def close(self) -> None:
        """Wait until an interrupted batch has ended. A second call does nothing."""
        if self._thread is not None and os.getpid() == self._pid:
            self._batches.put(None)
            self._thread.join()
            self._thread = None


def _start(batches: _Queue) -> threading.Thread:
    # The thread is a daemon: when the interpreter ends, the thread stops where it is and holds the
    # session's lock. The server frees its grants when the process is proven gone.
    thread = threading.Thread(target=_work_off, args=(batches,), name="beluga-batches", daemon=True)
    thread.start()
    return thread


def _work_off(batches: _Queue) -> None:
    while (batch := batches.get()) is not None:
        _work(batch)
        del batch  # the caller may use its memory again


def _work(batch: _Batch) -> None:
    try:
        batch.result = batch.run(lambda: batch.left)
    except BaseException as error:  # the caller has to see any error
        batch.error = error
    finally:
        batch.over = True
        batch.ended.release()
