# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Interrupts at chosen points of Beluga's Python, by the rules of CPython.

CPython raises what a signal's handler raises in the main thread, when a Python function begins and
when a call of C has returned (its result is lost then). The profiler's events are those points.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

import beluga

_PACKAGE = str(Path(beluga.__file__).parent)
_POINTS = ("call", "c_return")


class Interrupts:
    """A context in which the points of this thread's Beluga code are counted, and
    ``KeyboardInterrupt`` is raised at those whose numbers are in ``at``, from 1 on. ``count`` is
    how many there were.
    """

    def __init__(self, at: Collection[int] = ()) -> None:
        self._at = at
        self.count = 0
        self.raised = threading.Event()

    def __enter__(self) -> Interrupts:
        sys.setprofile(self._point)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _point(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in _POINTS or not frame.f_code.co_filename.startswith(_PACKAGE):
            return
        self.count += 1
        if self.count in self._at:
            self.raised.set()
            sys.setprofile(self._point)  # an exception of the profiler's ends it
            raise KeyboardInterrupt
