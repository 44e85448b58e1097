# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A store that hangs or fails: threads that may hang, and a circuit breaker for calls to the store.

Each thread runs one operation of a client library at a time. The threads of ``concurrent.futures``
do not fit: a hanging one would be lost for good, and would prevent the interpreter from exiting.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as first_of
from dataclasses import dataclass
from typing import Any

from beluga.threads import Thread
from beluga.tiers.remote.store import RemoteSettings

CLOSED, HALF_OPEN, OPEN = 0, 1, 2


class Breaker:
    """While closed, calls are allowed. While open, they are not, except for a trial from time to
    time.

    ``failures`` failures in a row open the breaker. After ``open_s`` one trial may start
    (half-open). If it succeeds, the breaker closes, but then a single failure opens it again, for
    twice as long as before, until an operation other than a trial succeeds. Example with open_s
    0.5, for a store that replies to each trial but to no load: open 0.5 s, trial, one load fails,
    open 1 s, trial, one load fails, open 2 s. Pauses vary by a quarter, so that clients do not
    retry in step.

    Any thread may call any method.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._settings, self._clock, self._chance = settings, clock, chance
        self._lock = threading.Lock()
        self._state, self._failed = CLOSED, 0
        self._pause_s, self._until = settings.open_s, 0.0
        self._closed_at = float("-inf")
        self.openings = 0

    @property
    def state(self) -> int:
        """The state: CLOSED (0), HALF_OPEN (1) or OPEN (2)."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether calls are allowed."""
        return self._state == CLOSED

    def begin_trial(self) -> bool:
        """Return whether the caller should make a trial now. Only one caller gets True."""
        with self._lock:
            if self._state != OPEN or self._clock() < self._until:
                return False
            self._state = HALF_OPEN
            return True

    def end_trial(self, succeeded: bool) -> None:
        """Report the result of a trial. Does nothing if no trial is running."""
        with self._lock:
            if self._state != HALF_OPEN:
                return
            if succeeded:
                self._state, self._failed = CLOSED, self._settings.failures - 1
                self._closed_at = self._clock()
            else:
                self._open()

    def succeeded(self) -> None:
        """Report a successful operation. One that started before the breaker opened does not close
        it.
        """
        with self._lock:
            if self._state == CLOSED:
                self._failed, self._pause_s = 0, self._settings.open_s

    def failed(self, begun: float) -> bool:
        """Report a failed operation that started at ``begun`` (of the clock), and return whether
        this opened the breaker. A failure of an operation that started before the last trial is
        outdated and ignored.
        """
        with self._lock:
            if self._state != CLOSED or begun < self._closed_at:
                return False
            self._failed += 1
            if self._failed < self._settings.failures:
                return False
            self._open()
            self.openings += 1
            return True

    def _open(self) -> None:
        self._state = OPEN
        self._until = self._clock() + self._pause_s * (0.75 + 0.5 * self._chance())
        self._pause_s = min(2 * self._pause_s, self._settings.open_limit_s)


class HungError(Exception):
    """An operation has not ended in time, and its thread was abandoned."""


@dataclass(eq=False, slots=True)
class _Job:
    call: Callable[[], Any]
    future: Future[Any]
    urgent: bool
    begun: float = 0.0
    abandoned: bool = False


class StoreThreads:
    """``count`` threads with two queues. Urgent operations run first, and others use at most half
    of the threads, so that an urgent operation never waits for all of them. ``hung`` is called with
    the start time of each abandoned operation.

    An operation that has run for ``limit_s`` is abandoned: its future fails with HungError, and a
    new thread replaces its thread, up to ``count + spare`` threads in total. When an abandoned
    operation returns, its thread continues to work if there is room.
    """

    def __init__(
        self, count: int, *, spare: int, limit_s: float, name: str, hung: Callable[[float], None]
    ) -> None:
        self._count, self._spare, self._limit_s, self._hung = count, spare, limit_s, hung
        self._name = name
        self._work = threading.Condition()
        self._urgent: deque[_Job] = deque()
        self._others: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._threads = self._idle = self._abandoned = 0
        self._closed = False

    @property
    def abandoned(self) -> int:
        """The number of hanging threads."""
        return self._abandoned

    def submit(self, call: Callable[[], Any], *, urgent: bool) -> Future[Any]:
        """Run a function on a thread. Its future is cancelled if the workers are closed."""
        job = _Job(call, Future(), urgent)
        with self._work:
            if self._closed:
                job.future.cancel()
                return job.future
            (self._urgent if urgent else self._others).append(job)
            if self._idle < len(self._urgent) + len(self._others) and self._threads < self._count:
                self._start()
            self._work.notify()
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
        oldest = time.monotonic() - self._limit_s
        with self._work:
            hung = [job for job in self._running if job.begun <= oldest]
            for job in hung:
                job.abandoned = True
                self._running.remove(job)
                self._abandoned += 1
                self._threads -= 1
                if self._urgent or self._others:
                    self._start()
                    self._work.notify()
        for job in hung:
            self._hung(job.begun)
            job.future.set_exception(HungError(f"no answer within {self._limit_s:g} s"))

    def close(self, until: float) -> bool:
        """Cancel operations that have not started, and wait for the others until ``until``. Returns
        whether all have ended.
        """
        with self._work:
            self._closed = True
            dropped = [*self._urgent, *self._others]
            self._urgent.clear()
            self._others.clear()
            self._work.notify_all()
            running = [job.future for job in self._running]
        for job in dropped:
            job.future.cancel()
            job.future.set_running_or_notify_cancel()  # wakes the waiters
        self.wait(running, until)
        with self._work:
            return not (self._running or self._abandoned)

    def _next_limit(self, now: float) -> float:
        with self._work:
            begun = min((job.begun for job in self._running), default=now)
        return begun + self._limit_s

    def _may_start(self) -> bool:
        free = self._count + self._spare - self._threads - self._abandoned
        return self._threads < self._count and free > 0

    def _start(self) -> None:
        if not self._may_start():
            return
        thread = Thread(target=self._run, name=self._name, daemon=True)
        # No thread can be created now: another one will take the job
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._threads += 1

    def _next(self) -> _Job | None:
        """Return the next job that may run now, or None. The lock is held."""
        if self._urgent:
            return self._urgent.popleft()
        others = sum(not job.urgent for job in self._running)
        if self._others and others < self._count // 2:
            return self._others.popleft()
        return None

    def _run(self) -> None:
        while True:
            with self._work:
                while not (job := self._next()):
                    if self._closed:
                        self._threads -= 1
                        return
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                if not job.future.set_running_or_notify_cancel():
                    continue
                job.begun = time.monotonic()
                self._running.add(job)
            result, failure = None, None
            try:
                result = job.call()
            except BaseException as error:
                failure = error
            with self._work:
                if job.abandoned:
                    self._abandoned -= 1
                    if not self._may_start():
                        return
                    self._threads += 1
                    continue
                self._running.remove(job)
                self._work.notify()  # another save may run now
            if failure is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(failure)
            del job, result, failure
