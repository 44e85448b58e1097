# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Operations on a pool for which their callers need not wait: a worker executes them in order.

A caller submits an operation and gets an :class:`OpTicket`, with which it polls, waits or cancels.
An interrupt leaves the wait and not the operation: Python raises the exception of a signal handler
(``KeyboardInterrupt`` for Ctrl-C) at any point of the main thread, and no operation may stop
between its grants and their end (D15).
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from beluga._ffi import ffi
from beluga.errors import ForkedSessionError, RpcError, TransferCancelledError
from beluga.threads import refuse_green_threads

T = TypeVar("T")
Operation = Callable[["OpTicket[T]"], T]


def _held() -> threading.Lock:
    """Return a held lock that others wait for with ``with lock: pass``, which an interrupt always
    leaves unlocked. ``threading.Event`` does not work: an interrupt there raises other errors.
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


class OpTicket(Generic[T]):
    """One operation, from :meth:`OpWorker.submit` to its end. Thread-safe."""

    __slots__ = (
        "_began",
        "_calls",
        "_done",
        "_ended",
        "_error",
        "_queued",
        "_result",
        "_then",
        "flag",
    )

    def __init__(self, call: Operation[T]) -> None:
        self._calls = [call]  # who takes it out ends the operation
        self._done = False
        self._ended, self._queued, self._began = _held(), False, False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._then: list[Callable[[OpTicket[T]], object]] = []
        self.flag = ffi.new("uint32_t *")
        """For C: not 0 if it was cancelled."""

    @property
    def cancelled(self) -> bool:
        """Whether the caller needs no result; it may end early, and publishes nothing."""
        return self.flag[0] != 0

    @property
    def began(self) -> bool:
        """Whether it has begun; False if it ended without."""
        return self._began

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._done

    @property
    def result(self) -> T | None:
        """What it returned; None before its end, and if it raised."""
        return self._result

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait until it has ended, and return its result.

        Raises its error, TransferCancelledError if it was cancelled before it began, and
        TimeoutError after ``timeout_s`` seconds.
        """
        if not self._done:  # else an interrupt between the two would block later waits
            if not self._ended.acquire(timeout=-1 if timeout_s is None else timeout_s):
                raise TimeoutError("the operation has not ended in time; it continues")
            self._ended.release()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set before the end

    def cancel(self) -> None:
        """Let it end as soon as possible. If it has not begun, it ends now."""
        self.flag[0] = 1
        if self._calls:
            self._refuse(TransferCancelledError("the operation was cancelled before it began"))

    def then(self, call: Callable[[OpTicket[T]], object]) -> None:
        """Call ``call`` with this ticket when it has ended, on the worker's thread, or at once. It
        must not raise.
        """
        self._then.append(call)
        if self._done:
            self._run_then()

    def _run_then(self) -> None:
        while True:
            try:
                call = self._then.pop(0)
            except IndexError:  # also because the other thread took it
                return
            call(self)

    def _run(self) -> None:
        """Execute it, unless it was cancelled."""
        if self.cancelled:
            self.cancel()
        try:
            call = self._calls.pop()
        except IndexError:
            return
        self._began = True
        try:
            self._result = call(self)
        except BaseException as error:  # the caller must get any error
            self._error = error
        del call  # the caller may reuse its memory
        self._end()

    def _refuse(self, error: Exception) -> None:
        """End it with this error, unless it has begun."""
        try:
            self._calls.pop()
        except IndexError:
            return
        self._error = error
        self._end()

    def _end(self) -> None:
        self._done = True
        self._ended.release()
        self._run_then()


_Entry = tuple[float, int, "OpTicket[Any]"]
_Queue = queue.SimpleQueue["_Entry | None"]


class OpWorker:
    """A thread that executes operations one at a time, in order. It starts with the first one.

    An interrupt during its start leaves nothing behind: only this object refers to the queue, and
    the thread ends when the object is freed. This does not hold for ``threading.Thread``, whose
    ``start`` waits for an event. The thread is a daemon: at interpreter exit it stops wherever it
    is, and the server frees the session's grants once the process is proven dead.

    ``niceness`` is added to that of the process.
    """

    def __init__(self, *, niceness: int = 0) -> None:
        self._niceness = niceness
        self._queue: _Queue | None = None  # of the thread
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards what follows
        self._ended = threading.Lock()  # locked while the thread runs
        self._closed = False
        self._thread = 0
        self._pid = os.getpid()

    def submit(self, call: Operation[T], *, after_s: float = 0.0) -> OpTicket[T]:
        """Queue an operation, and return at once. With ``after_s`` it begins that many seconds
        later, or ends at :meth:`close`, cancelled.

        After :meth:`close` the ticket has ended with an :class:`~beluga.errors.RpcError`. Raises
        :class:`~beluga.errors.ForkedSessionError` in a forked child, which has no thread.
        """
        ticket = OpTicket(call)
        self._put(ticket, after_s)
        return ticket

    def run(self, call: Operation[T]) -> T:
        """Queue an operation, wait until it has ended, and return its result or raise its error.

        An interrupt cancels it, and is raised when it has ended. A second interrupt is raised at
        once; the operation then ends without its caller. Raises as :meth:`submit`.
        """
        ticket = OpTicket(call)
        try:
            self._put(ticket, 0.0)
            with ticket._ended:
                pass
        except BaseException:
            ticket.flag[0] = 1  # first, so that a second interrupt finds it set
            if ticket._queued:
                with ticket._ended:
                    pass
            raise
        return ticket.wait()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this worker's."""
        return _thread.get_ident() == self._thread

    def close(self) -> None:
        """Execute the submitted operations, and end the thread. Idempotent. From one of its own
        operations, it returns at once.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            if self._queue is not None:
                self._queue.put(None)
        if not self.is_current:
            with self._ended:
                pass

    def _put(self, ticket: OpTicket[T], after_s: float) -> None:
        if os.getpid() != self._pid:
            raise ForkedSessionError(
                "this worker belongs to the parent process; make a new one after fork"
            )
        due_s = time.monotonic() + after_s if after_s else 0.0
        entry = due_s, next(self._numbers), ticket
        with self._lock:
            if not self._closed:
                if self._queue is None:
                    self._start()
                assert self._queue is not None  # noqa: S101
                ticket._queued = True
                self._queue.put(entry)
                return
        ticket._refuse(RpcError("this cache or connection is closed; make a new one"))

    def _start(self) -> None:
        refuse_green_threads()
        entries: _Queue = queue.SimpleQueue()
        ended = _held()
        weakref.finalize(self, entries.put, None)
        self._thread = _thread.start_new_thread(_work_off, (entries, ended, self._niceness))
        self._ended, self._queue = ended, entries


def _work_off(entries: _Queue, ended: threading.Lock, niceness: int) -> None:
    if niceness:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    waiting: list[_Entry] = []
    entry: _Entry | None
    try:
        while True:
            wait_s = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
            try:
                entry = entries.get(timeout=wait_s)
            except queue.Empty:
                entry = heapq.heappop(waiting)
            if entry is None:
                break
            if entry[0] > time.monotonic():
                heapq.heappush(waiting, entry)
            else:
                entry[2]._run()
            del entry  # the caller may reuse its memory
        for _, _, ticket in waiting:
            ticket._refuse(TransferCancelledError("its worker was closed before it began"))
    finally:
        ended.release()
