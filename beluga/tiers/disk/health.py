# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A disk that hangs or fails.

Each call of a disk tier runs on its own thread, because a hanging disk blocks the thread: neither a
signal nor a deadline ends a system call that waits for a disk. For example, a load reads from a
disk that hangs. After ``limit_s`` the caller returns misses. The thread keeps the buffers and the
pins until the kernel ends the read, and then releases them.

Interrupts (``KeyboardInterrupt`` for Ctrl-C) are raised only in the main thread. So they end the
wait for a call, but never the call itself between acquiring and releasing resources.

Failures are counted and logged once a minute, and a disk that fails repeatedly is not used for a
while.
"""

from __future__ import annotations

import _thread
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from beluga.limit import LogLimit, and_more
from beluga.metrics import REGISTRY

_T = TypeVar("_T")

_SLOWEST = 4 << 20  # bytes per second; a slower disk counts as hanging
_HUNG_MAX = 16  # hanging calls above which no new ones start
_IDLE_S = 10.0  # how long an idle thread waits for another call
_LONG_S = 3600.0

_LOG = logging.getLogger(__name__)
_FAILURES = REGISTRY.counter("beluga_tier_failures_total", "Failures of a tier's medium, by kind.")
_KINDS = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read-only",
    errno.EPERM: "read-only",
    errno.EACCES: "read-only",
    errno.EBADMSG: "checksum",
    errno.ENODATA: "short",
    errno.ETIMEDOUT: "timeout",
    errno.ENOENT: "vanished",
    errno.ENODEV: "vanished",
    errno.ENXIO: "vanished",
    errno.ESTALE: "vanished",
}

_PATIENCE = 3
# Attempts in a row with damaged blocks that count as one failure of the disk
_DAMAGED_PATIENCE = 16
_PAUSE_S = 0.5
_PAUSE_MAX_S = 30.0


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
    """The threads of one disk: one per running call, and idle ones that wait for the next.
    Thread-safe.

    They do not use ``threading.Thread``, which an interrupt could leave half started, and which
    would prevent the interpreter from exiting while a disk hangs.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._idle: deque[SimpleQueue[DiskCall[Any]]] = deque()
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
        if self._hung_calls and not call.always and self.hung >= _HUNG_MAX:
            call.running = False
            return False
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = SimpleQueue()
            try:
                _thread.start_new_thread(_work_off, (calls, self._idle))
            except RuntimeError:  # the process has reached its limit of threads
                call.running = False
                return False
        calls.put(call)
        return True


def _work_off(calls: SimpleQueue[DiskCall[Any]], idle: deque[SimpleQueue[DiskCall[Any]]]) -> None:
    """Run calls until none has arrived for a while."""
    taken = True  # unless it is in the idle list, a call will arrive
    while True:
        try:
            call = calls.get(timeout=_IDLE_S)
        except Empty:
            if taken:  # after an interrupt no call will arrive
                return
            try:
                idle.remove(calls)
            except ValueError:
                taken = True
                continue
            return
        call.run()
        del call  # the call's memory may be reused
        taken = False
        idle.append(calls)


class DirectionHealth:
    """The health of one direction of a disk: its loads, or its saves. Thread-safe.

    After ``_PATIENCE`` failures in a row the disk is not used for ``_PAUSE_S``, then tried again;
    each further failure doubles the pause, up to ``_PAUSE_MAX_S``. A disk that hangs is paused at
    once. A damaged block is dropped when it is read, so a few of them do not cause a pause.
    """

    def __init__(
        self, tier: str, operation: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tier, self._operation, self._clock = tier, operation, clock
        self._limit = LogLimit(clock=clock)
        self._failures, self._until = 0, float("-inf")
        self._damaged = 0
        self._lock = threading.Lock()

    @property
    def failing(self) -> bool:
        """Whether the last attempts failed often enough for a pause."""
        return self._failures >= _PATIENCE

    def allows(self) -> bool:
        """Return whether the disk may be used now."""
        return self._clock() >= self._until

    def succeeded(self) -> None:
        """Count a successful operation."""
        self._failures, self._until = 0, float("-inf")
        self._damaged = 0

    def failed(self, code: int, count: int = 1) -> None:
        """Count ``count`` failures with this errno, in one attempt."""
        kind = _KINDS.get(code, "io")
        _FAILURES.add(count, tier=self._tier, operation=self._operation, kind=kind)
        now = self._clock()
        with self._lock:
            weight = self._weight(code)
            self._failures += weight
            over = self._failures - _PATIENCE
            if over >= 0 and weight:
                self._until = now + min(_PAUSE_MAX_S, _PAUSE_S * 2 ** min(over, 20))
        if (suppressed := self._limit.passes(kind)) is not None:
            _LOG.warning(
                "%s: a %s failed: %s (%s); its blocks count as %s%s",
                self._tier,
                self._operation,
                kind,
                errno.errorcode.get(code, code),
                "misses" if self._operation == "load" else "not saved",
                and_more(suppressed),
            )

    def _weight(self, code: int) -> int:
        """Return the number of disk failures that an attempt counts for. The lock is held."""
        if code == errno.ETIMEDOUT:
            return _PATIENCE
        if code != errno.EBADMSG:
            return 1
        self._damaged += 1
        return int(self._damaged % _DAMAGED_PATIENCE == 0)
