# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls that may hang, on threads that their callers can leave.

A hanging disk or client library blocks its thread: neither a signal nor a deadline ends it. For
example, a load reads from a disk that hangs. After ``limit_s`` the caller returns misses. The
thread keeps the buffers and the pins until the kernel ends the read, and then releases them.

Interrupts (``KeyboardInterrupt`` for Ctrl-C) are raised only in the main thread. So they end the
wait for a call, but never the call itself between acquiring and releasing resources.

The threads of ``concurrent.futures`` do not fit: a hanging one would be lost for good. Those of
``threading`` do not fit either: an interrupt could leave one half started, and a hanging one would
prevent the interpreter from exiting.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as first_of
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

_SLOWEST = 4 << 20  # bytes per second; a slower disk counts as hanging
_HUNG_MAX = 16  # hanging calls of a disk above which no new ones start
_IDLE_S = 10.0  # how long an idle thread waits for another call
_LONG_S = 3600.0


class _Threads:
    """A thread for each running call, and idle ones that wait for the next. Thread-safe."""

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[Callable[[], None]]] = deque()

    def run(self, call: Callable[[], None]) -> bool:
        """Run a call that raises nothing. Returns False if no thread can be created."""
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = SimpleQueue()
            try:
                _thread.start_new_thread(self._work_off, (calls,))
            except RuntimeError:  # the process has reached its limit of threads
                return False
        calls.put(call)
        return True

    def _work_off(self, calls: SimpleQueue[Callable[[], None]]) -> None:
        """Run calls until none has arrived for a while."""
        taken = True  # unless it is in the idle list, a call will arrive
        while True:
            try:
                call = calls.get(timeout=_IDLE_S)
            except Empty:
                if taken:  # after an interrupt no call will arrive
                    return
                try:
                    self._idle.remove(calls)
                except ValueError:
                    taken = True
                    continue
                return
            call()
            del call  # the call's memory may be reused
            taken = False
            self._idle.append(calls)


# ---- A disk: as many calls as there are callers; their number is bounded once some hang.


class AbandonedError(Exception):
    """The caller has stopped waiting, so the call must not continue: its memory may be reused."""


class DiskCall(Generic[_T]):
    """A call that :class:`DiskThreads` runs while its caller waits.

    ``work(call)`` performs it, with a :meth:`step` before each disk operation. ``hung()`` returns
    the result if a step is not done in time. After that, or after an interrupt of the wait, the
    call is abandoned: the next step raises :class:`AbandonedError`, and ``work`` releases its
    resources.
    """

    def __init__(
        self,
        threads: DiskThreads,
        work: Callable[[DiskCall[_T]], _T],
        hung: Callable[[], _T],
        *,
        always: bool = False,
    ) -> None:
        self._threads, self._work, self._hung = threads, work, hung
        self.always = always  # start although too many calls hang
        self._ended = threading.Lock()  # locked until the call has ended
        self._ended.acquire()
        self._until = 0.0
        self._begun = False
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self.abandoned = False
        self.running = True

    def start(self) -> None:
        """Start the call. The caller must then call :meth:`result` or :meth:`leave`."""
        self._begun = True
        self._until = time.monotonic() + self._threads.limit_s
        if not self._threads.execute(self):
            self._until = 0.0

    def step(self, size: int = 0) -> None:
        """Start a disk operation of ``size`` bytes. Raises AbandonedError after :meth:`leave`."""
        if self.abandoned:
            raise AbandonedError
        self._until = time.monotonic() + self._threads.limit_s + size / _SLOWEST

    def lift_limit(self) -> None:
        """Lift the time limit: what follows does not use the disk."""
        self._until = float("inf")

    def leave(self) -> None:
        """Stop waiting for the result."""
        self.abandoned = True

    def result(self) -> _T:
        """Wait for the result and return it. Raises the call's exception."""
        try:
            if not self._begun:
                self.start()
            while not self._ended.acquire(timeout=self._patience()):
                if time.monotonic() >= self._until:
                    self.abandoned = True
                    self._threads.hang(self)
                    return self._hung()
        except BaseException:
            self.abandoned = True
            raise
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _patience(self) -> float:
        return min(max(self._until - time.monotonic(), 0.0), _LONG_S)

    def run(self) -> None:
        """Run the call on its thread."""
        try:
            self._results.append(self._work(self))
        except BaseException as error:  # the caller must get any error
            self._error = error
        finally:
            self.running = False
            self._ended.release()


class DiskThreads:
    """The threads of one disk: one per running call. Thread-safe."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._threads = _Threads()
        self._hung_calls: list[DiskCall[Any]] = []
        self._lock = threading.Lock()

    @property
    def hung(self) -> int:
        """The number of hanging calls: their callers have left, but they have not ended."""
        with self._lock:
            self._hung_calls = [call for call in self._hung_calls if call.running]
            return len(self._hung_calls)

    def hang(self, call: DiskCall[Any]) -> None:
        """Register a call whose caller has left because it hangs."""
        with self._lock:
            self._hung_calls.append(call)

    def execute(self, call: DiskCall[Any]) -> bool:
        """Hand a call to a thread. Returns False if too many calls hang, or no thread can be
        created.
        """
        is_refused = self._hung_calls and not call.always and self.hung >= _HUNG_MAX
        call.running = not is_refused and self._threads.run(call.run)
        return call.running


# ---- A store: a bounded number of operations, urgent ones first.


class HungError(Exception):
    """An operation has not ended in time, and its thread was abandoned."""


@dataclass(eq=False, slots=True)
class _Job:
    call: Callable[[], Any]
    urgent: bool
    future: Future[Any] = field(default_factory=Future)
    begun_s: float = 0.0
    abandoned: bool = False


class StoreThreads:
    """Up to ``count`` concurrent operations from two queues. Urgent operations run first, and
    others are at most half of them, so that an urgent operation never waits for all of them.
    ``hung`` is called with the start time of each abandoned operation.

    An operation that has run for ``limit_s`` is abandoned: its future fails with HungError, and
    another one may run in its place, up to ``count + spare`` in total.
    """

    def __init__(
        self, count: int, *, spare: int, limit_s: float, hung: Callable[[float], None]
    ) -> None:
        self._count, self._spare, self._limit_s, self._hung = count, spare, limit_s, hung
        self._threads = _Threads()
        self._lock = threading.Lock()
        self._urgent: deque[_Job] = deque()
        self._others: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._abandoned = 0
        self._closed = False

    @property
    def abandoned(self) -> int:
        """The number of hanging threads."""
        return self._abandoned

    def submit(self, call: Callable[[], Any], *, urgent: bool) -> Future[Any]:
        """Run a function on a thread. Its future is cancelled if the workers are closed."""
        job = _Job(call, urgent)
        with self._lock:
            if self._closed:
                job.future.cancel()
            else:
                (self._urgent if urgent else self._others).append(job)
                self._start()
        return job.future

    def wait(self, futures: Iterable[Future[Any]], until: float, *, for_all: bool = True) -> None:
        """Wait for all futures, or for one, until ``until`` (time.monotonic()). Hung operations are
        abandoned meanwhile.
        """
        pending = {future for future in futures if not future.done()}
        while pending:
            self.reap()
            now = time.monotonic()
            if now >= until:
                return
            ended, pending = first_of(
                pending, min(until, self._next_limit(now)) - now, return_when=FIRST_COMPLETED
            )
            if ended and not for_all:
                return

    def reap(self) -> None:
        """Abandon the operations that have run for too long."""
        oldest_s = time.monotonic() - self._limit_s
        with self._lock:
            hung = [
                job for job in self._running if job.begun_s <= oldest_s and job.future.running()
            ]
            for job in hung:
                job.abandoned = True
                self._running.remove(job)
            self._abandoned += len(hung)
            self._start()
        for job in hung:
            self._hung(job.begun_s)
            job.future.set_exception(HungError(f"no answer within {self._limit_s:g} s"))

    def close(self, until: float) -> bool:
        """Cancel operations that have not started, and wait for the others until ``until``. Returns
        whether all have ended.
        """
        with self._lock:
            self._closed = True
            dropped = [*self._urgent, *self._others]
            self._urgent.clear()
            self._others.clear()
            running = [job.future for job in self._running]
        for job in dropped:
            job.future.cancel()
            job.future.set_running_or_notify_cancel()  # wakes the waiters
        self.wait(running, until)
        with self._lock:
            return not (self._running or self._abandoned)

    def _next_limit(self, now: float) -> float:
        with self._lock:
            return min((job.begun_s for job in self._running), default=now) + self._limit_s

    # The lock is held.

    def _start(self) -> None:
        while (job := self._take()) is not None:
            if not self._threads.run(partial(self._run, job)):  # the end of another job starts it
                self._running.remove(job)
                (self._urgent if job.urgent else self._others).appendleft(job)
                return

    def _take(self) -> _Job | None:
        """Return the next job that may run now, which then counts as running."""
        count = len(self._running)
        if count >= min(self._count, self._count + self._spare - self._abandoned):
            return None
        if self._urgent:
            job = self._urgent.popleft()
        elif self._others and sum(not job.urgent for job in self._running) < self._count // 2:
            job = self._others.popleft()
        else:
            return None
        job.begun_s = time.monotonic()
        self._running.add(job)
        return job

    # On a thread.

    def _run(self, first: _Job) -> None:
        job: _Job | None = first
        while job is not None:
            result, failure = None, None
            is_wanted = job.future.set_running_or_notify_cancel()
            try:
                result = job.call() if is_wanted else None
            except BaseException as error:
                failure = error
            with self._lock:
                if job.abandoned:
                    self._abandoned -= 1
                else:
                    self._running.remove(job)
                ended, job = job, self._take()
            if is_wanted and not ended.abandoned:
                if failure is None:
                    ended.future.set_result(result)
                else:
                    ended.future.set_exception(failure)
            del ended, result, failure
