# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The calls of a disk tier. Each runs in a thread of its own, because a disk that hangs keeps its
thread: neither a signal nor a deadline ends a system call that waits for a disk.

For example, a load reads from a disk that hangs. After ``limit_s`` the caller leaves with misses.
The thread keeps the buffers and the pins until the kernel ends the read, and then gives them back.

Interrupts come in the main thread only (``KeyboardInterrupt`` for Ctrl-C), so they end the wait for
a call, and never the call itself between what it takes and what it gives back.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

_SLOWEST = 4 << 20  # bytes in a second; a disk that moves fewer hangs
_HUNG_MAX = 16  # calls that hang, after which no more are begun
_IDLE_S = 10.0  # how long a thread waits for another call
_LONG_S = 3600.0


class LeftError(Exception):
    """The caller has left, so a call must not go on: its memory may be used for something else."""


class DiskCall(Generic[_T]):
    """A call that is executed by :class:`DiskThreads`, and awaited by its caller.

    ``work(call)`` does it, with a :meth:`step` before each operation of the disk. ``hung()`` gives
    the result if a step is not done in time. Then, or if an interrupt ends the wait, the caller has
    left: the next step raises :class:`LeftError`, and ``work`` gives back what it holds.
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
        self.always = always  # it is begun however many others hang
        self._ended = threading.Lock()  # it is held until the call has ended
        self._ended.acquire()
        self._until = 0.0
        self._begun = False
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self.left = False
        self.running = True

    def start(self) -> None:
        """Begin the call. Its caller must come for the result, or :meth:`leave`."""
        self._begun = True
        self._until = time.monotonic() + self._threads.limit_s
        if not self._threads.execute(self):
            self._until = 0.0

    def step(self, size: int = 0) -> None:
        """Begin an operation of the disk with so many bytes. Raises LeftError if the caller has
        left.
        """
        if self.left:
            raise LeftError
        self._until = time.monotonic() + self._threads.limit_s + size / _SLOWEST

    def rest(self) -> None:
        """Let the caller wait for as long as it takes: what follows is no operation of the disk."""
        self._until = float("inf")

    def leave(self) -> None:
        """Do not wait for the result any more."""
        self.left = True

    def result(self) -> _T:
        """Wait for the result, and return it. Raises what the call has raised."""
        try:
            if not self._begun:
                self.start()
            while not self._ended.acquire(timeout=self._patience()):
                if time.monotonic() >= self._until:
                    self.left = True
                    self._threads.hang(self)
                    return self._hung()
        except BaseException:
            self.left = True
            raise
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _patience(self) -> float:
        return min(max(self._until - time.monotonic(), 0.0), _LONG_S)

    def run(self) -> None:
        """Execute the call, in its thread."""
        try:
            self._results.append(self._work(self))
        except BaseException as error:  # the caller has to see any error
            self._error = error
        finally:
            self.running = False
            self._ended.release()


class DiskThreads:
    """The threads of one disk: as many as there are calls, and those that have just ended one. Any
    thread may call it.

    They are not made by ``threading.Thread``, which an interrupt could leave half started, and
    which would keep the interpreter from ending while a disk hangs.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._idle: deque[SimpleQueue[DiskCall[Any]]] = deque()
        self._left: list[DiskCall[Any]] = []
        self._lock = threading.Lock()

    @property
    def hung(self) -> int:
        """How many calls hang: their callers have left, and they have not ended."""
        with self._lock:
            self._left = [call for call in self._left if call.running]
            return len(self._left)

    def hang(self, call: DiskCall[Any]) -> None:
        """Note a call whose caller has left because it hangs."""
        with self._lock:
            self._left.append(call)

    def execute(self, call: DiskCall[Any]) -> bool:
        """Give a call to a thread. Return False if too many hang, or no thread can be made."""
        if self._left and not call.always and self.hung >= _HUNG_MAX:
            call.running = False
            return False
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = SimpleQueue()
            try:
                _thread.start_new_thread(_work_off, (calls, self._idle))
            except RuntimeError:  # the process has as many threads as it may have
                call.running = False
                return False
        calls.put(call)
        return True


def _work_off(calls: SimpleQueue[DiskCall[Any]], idle: deque[SimpleQueue[DiskCall[Any]]]) -> None:
    """Execute calls until none has come for a while."""
    taken = True  # as long as it is not among the idle ones, a call is on its way
    while True:
        try:
            call = calls.get(timeout=_IDLE_S)
        except Empty:
            if taken:  # an interrupt came between, and no call will come
                return
            try:
                idle.remove(calls)
            except ValueError:
                taken = True
                continue
            return
        call.run()
        del call  # its memory may be used again
        taken = False
        idle.append(calls)
