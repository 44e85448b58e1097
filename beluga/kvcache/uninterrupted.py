# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs a batch so that no interrupt can stop it between its grants and their end.

Python raises the exception of a signal handler (``KeyboardInterrupt`` for Ctrl-C) at any point of
the main thread. So batches of the main thread run on a thread of the cache, while the main thread
waits. The first interrupt drops the batch, and is raised when the batch has ended. The second one
is raised at once; the batch then ends without the main thread and returns its grants.
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
"""Returns whether the caller of the batch was interrupted. If so, nothing of the batch may be
published, because its memory may already be reused.
"""


def _held() -> threading.Lock:
    """Return a held lock that others wait for with ``with lock: pass``, which an interrupt always
    leaves unlocked. ``threading.Event`` does not work: an interrupt there raises other errors.
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Batch:
    """One batch. ``ended`` is locked until the batch is over."""

    __slots__ = ("ended", "error", "left", "result", "run")

    def __init__(self, run: Callable[[Left], int]) -> None:
        self.run, self.left, self.result = run, False, 0
        self.error: BaseException | None = None
        self.ended = _held()


_Queue = queue.SimpleQueue["_Batch | None"]


class _Worker:
    """A thread that runs batches from a queue. ``ended`` is locked until the thread has finished.

    An interrupt during construction leaves nothing behind: only this object refers to the queue,
    and the thread ends when the object is freed. This does not hold for ``threading.Thread``, whose
    ``start`` waits for an event. The thread is a daemon: at interpreter exit it stops wherever it
    is, holding the session's lock, and the server frees its grants once the process is proven dead.
    """

    def __init__(self) -> None:
        self.batches: _Queue = queue.SimpleQueue()
        self.ended = _held()
        weakref.finalize(self, self.batches.put, None)
        _thread.start_new_thread(_work_off, (self.batches, self.ended))


class Uninterrupted:
    """Runs one batch at a time.

    The thread starts with the first batch of the main thread. Signals do not interrupt other
    threads, so these run their own batches.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._closing = False
        self._pid = os.getpid()

    def run(self, run: Callable[[Left], int]) -> int:
        """Call ``run`` and return its result. Its argument returns whether to drop the batch.

        Raises :class:`~beluga.errors.RpcError` after :meth:`close`.
        """
        if self._closing:  # after an interrupted close, the thread takes no more batches
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
        """Wait until an interrupted batch has ended. Idempotent."""
        self._closing = True
        if self._worker is not None and os.getpid() == self._pid:
            self._worker.batches.put(None)
            with self._worker.ended:
                pass
            self._worker = None


def _work_off(batches: _Queue, ended: threading.Lock) -> None:
    while (batch := batches.get()) is not None:
        _work(batch)
        del batch  # the caller may reuse its memory
    ended.release()


def _work(batch: _Batch) -> None:
    try:
        batch.result = batch.run(lambda: batch.left)
    except BaseException as error:  # the caller must get any error
        batch.error = error
    finally:
        batch.ended.release()
