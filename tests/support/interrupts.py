# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Interrupts at chosen points of Beluga's Python, by the rules of CPython. CPython runs a signal
handler in the main thread when a Python function starts, or when a call of C has returned (its
result is lost if the handler raises). The profiler gets events at these points, so it simulates
Ctrl-C at a chosen one, and the interpreter does the rest.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

import beluga

PACKAGE = str(Path(beluga.__file__).parent)
_POINTS = ("call", "c_return")


class _CtrlC:
    """``-_CTRL_C`` simulates a SIGINT. A call cannot be used: the interpreter checks for signals at
    its end, so the interrupt would be raised in the profiler, which ends the profiling. It does not
    check after an operator.
    """

    __neg__ = _thread.interrupt_main


_CTRL_C = _CtrlC()


class Interrupts:
    """A context of the main thread in which the points of Beluga's code are counted, and
    ``KeyboardInterrupt`` is raised at those whose numbers are in ``at``, from 1 on. ``count`` is
    their number; ``raised`` is set once an interrupt was raised. With ``called``, points of the
    Python code that Beluga calls (the standard library's) are counted, too.
    """

    def __init__(self, at: Collection[int] = (), *, called: bool = False) -> None:
        self._at = at
        self._counts = within_beluga if called else _of_beluga
        self.count = 0
        self.raised = threading.Event()
        self._profiler = self._point
        """One object for the whole context. An interrupt in the profiler ends the profiling, and
        CPython then drops its reference. If that happens in a garbage collection at the start of a
        profiler's call, CPython 3.11 still makes that call, on a freed object.
        """

    def __enter__(self) -> Interrupts:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        sys.setprofile(self._profiler)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _point(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in _POINTS or not self._counts(frame):
            return
        self.count += 1
        if self.count in self._at:
            self.raised.set()
            -_CTRL_C  # type: ignore[operator]  # noqa: B018


def within_beluga(frame: FrameType | None) -> bool:
    """Whether the frame belongs to Beluga, or to a function that Beluga's code has called. The
    profiler's own frames do not: an interrupt there would prevent a call of C, which no interrupt
    does without a profiler. Nor do those of pytest, which Python calls after an interrupted
    finalizer: a second interrupt there would be an error of the test.
    """
    if frame is not None and frame.f_code.co_filename == __file__:
        return False
    while frame is not None and not _of_beluga(frame):
        if frame.f_globals.get("__name__", "").startswith("_pytest."):
            return False
        frame = frame.f_back
    return frame is not None


def _of_beluga(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)
