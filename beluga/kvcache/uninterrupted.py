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

import _thread
import os
import queue
import threading
import weakref
from collections.abc import Callable

from beluga.errors import RpcError

Left = Callable[[], bool]
"""Has the caller of the batch been interrupted? If so, nothing of the batch may be published,
because its memory may be used for something else."""


def _held() -> threading.Lock:
    """Return a lock for others to wait for: ``with lock: pass``, which an interrupt leaves unlocked
    wherever it comes. ``threading.Event`` would not do: an interrupt there raises other errors.
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Batch:
    """One batch; ``ended`` is held until the batch is over."""

    __slots__ = ("ended", "error", "left", "result", "run")

    def __init__(self, run: Callable[[Left], int]) -> None:
        self.run, self.left, self.result = run, False, 0
        self.error: BaseException | None = None
        self.ended = _held()


_Queue = queue.SimpleQueue["_Batch | None"]


class _Worker:
    """A thread that works a queue of batches off; ``ended`` is held until the thread is done.

    An interrupt while it is made leaves nothing behind: nobody else knows the queue, and the thread
    ends when this object is freed. That holds only without ``threading.Thread``, whose ``start``
    waits for an event. The thread is a daemon: when the interpreter ends, the thread stops where it
    is and holds the session's lock. The server frees its grants when the process is proven gone.
    """

    def __init__(self) -> None:
        self.batches: _Queue = queue.SimpleQueue()
        self.ended = _held()
        weakref.finalize(self, self.batches.put, None)
        _thread.start_new_thread(_work_off, (self.batches, self.ended))


class Uninterrupted:
    """Runs batches one after the other.

    The thread is started for the first batch of the main thread. Signals do not interrupt other
    threads, so those run their own batches.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._closing = False
        self._pid = os.getpid()

    def run(self, run: Callable[[Left], int]) -> int:
        """Call ``run`` and return its result; its argument says whether to drop the batch.

        Raises :class:`~beluga.errors.RpcError` once :meth:`close` was called.
        """
        if self._closing:  # an interrupted close leaves a thread that takes no more batches
            raise RpcError("this cache is closed; make a new one")
        main = threading.current_thread() is threading.main_thread()
        if not main or os.getpid() != self._pid:  # a forked child does not have the thread
            return run(lambda: False)
        if self._worker is None:
            self._worker = _Worker()
        batch = _Batch(run)
        try:
            self._worker.batches.put(batch)
            with batch.ended:
                pass
        except BaseException:
            batch.left = True  # first, so that a second interrupt finds it set
            with batch.ended:
                pass
            raise
        if batch.error is not None:
            raise batch.error
        return batch.result

    def close(self) -> None:
        """Wait until an interrupted batch has ended. A second call does nothing."""
        self._closing = True
        if self._worker is not None and os.getpid() == self._pid:
            self._worker.batches.put(None)
            with self._worker.ended:
                pass
            self._worker = None


def _work_off(batches: _Queue, ended: threading.Lock) -> None:
    while (batch := batches.get()) is not None:
        _work(batch)
        del batch  # the caller may use its memory again
    ended.release()


def _work(batch: _Batch) -> None:
    try:
        batch.result = batch.run(lambda: batch.left)
    except BaseException as error:  # the caller has to see any error
        batch.error = error
    finally:
        batch.ended.release()
