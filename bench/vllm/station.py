# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A station: an arm with one running engine, which measures its hits after its own cache was
emptied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from .arm import Arm
from .likeness import warnings
from .measure import awake
from .stream import Reply

_STREAM_S = 3600.0
_EMPTY_S = 60.0


class Station:
    """Takes requests. :meth:`empty` leaves it only what is in the arm's pool."""

    def __init__(self, stack: ExitStack, arm: Arm) -> None:
        """Start the engine; :meth:`ready` waits for it. ``stack`` ends it."""
        self.arm = arm
        self._engine = stack.enter_context(arm.engine("engine"))
        self._warned = 0

    @property
    def name(self) -> str:
        """The arm's name."""
        return self.arm.name

    def ready(self) -> None:
        """Wait until the engine is ready. Raises ChildError."""
        self._engine.ready()

    def stream(self, prompts: Sequence[list[int]], **how: Any) -> Reply:
        """Run ``stream`` of ``engine.py`` after a short request that wakes the engine."""
        return awake(self._engine).call("stream", timeout_s=_STREAM_S, prompts=prompts, **how)

    def generate(self, tokens: list[int]) -> Reply:
        """Run a single prompt after a short request that wakes the engine."""
        return awake(self._engine).generate(tokens)

    def figures(self) -> dict[str, float]:
        """Return the connector's counters since the engine started."""
        figures: dict[str, float] = self._engine.call("figures")["figures"]
        return figures

    def warnings(self) -> list[str]:
        """Return the connector's warnings since the last call."""
        logged = warnings(self._engine.log())
        new, self._warned = logged[self._warned :], len(logged)
        return new

    def wait(self, before: dict[str, float], tokens: int) -> None:
        """Wait until that many tokens can be found that were computed since ``before``. Raises
        ChildError.
        """
        self.arm.wait(self._engine, before, tokens)

    def empty(self) -> None:
        """Empty the engine's own prefix cache. Raises ChildError if it stays in use."""
        deadline = time.monotonic() + _EMPTY_S
        while not self._engine.call("reset")["reset"]:
            if time.monotonic() > deadline:
                raise self._engine.failed("its prefix cache could not be emptied")
            self._engine.call("idle")


def in_turn(stations: Sequence[Station], number: int) -> list[Station]:
    """Return all stations in an order that begins with another one each time, so that other load
    slows all equally.
    """
    first = number % len(stations)
    return [*stations[first:], *stations[:first]]
