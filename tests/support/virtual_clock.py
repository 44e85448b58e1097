# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Clocks that a test advances, and an event loop on which waiting takes no time."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class Clock:
    """A stand-in for the module ``time``: time passes only when a thread sleeps or a test advances
    it.
    """

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class _Selector(selectors.DefaultSelector):
    """Advances the loop's clock instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "all tasks wait, and no event is due"
            self.now_s += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run_virtually(scenario: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Run a scenario without threads, processes and peers on a loop with its own clock."""
    loop = _Loop()
    try:
        return loop.run_until_complete(scenario())
    finally:
        loop.close()
