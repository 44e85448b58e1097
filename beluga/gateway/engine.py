# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An engine as the router knows it: where it is, what it serves, whether it may be sent requests.

::

    STARTING --check passes--> UP --request fails, check fails--> DOWN --check passes--> UP

A check counts only if no request has failed since it began: what it saw may be older.
"""

from __future__ import annotations

import asyncio
import enum
import time
from typing import Any

from beluga.gateway.settings import EngineSpec
from beluga.router import Worker


class Health(enum.Enum):
    """What the last check, or a request since, has shown."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"


class Engine:
    """One engine process, with as many ranks as it likes behind one URL."""

    def __init__(self, worker: Worker, spec: EngineSpec) -> None:
        self.worker = worker
        self.spec = spec
        self.cards: list[dict[str, Any]] = []  # of /v1/models, once it was asked
        self.health = Health.STARTING
        self.why = "not checked yet"  # it is not up
        self.draining = False
        self.inflight = 0
        self.hit_tokens = self.prompt_tokens = 0  # expected cache hits, of all requests so far
        self.look = asyncio.Event()  # a check is wanted now
        self._failures = 0
        self._cool_until = 0.0  # monotonic

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def models(self) -> tuple[str, ...]:
        """What it serves: declared, else what it has listed."""
        return self.spec.models or tuple(str(card.get("id")) for card in self.cards)

    @property
    def cooling_s(self) -> float:
        """Seconds for which it has asked to be left alone."""
        return max(0.0, self._cool_until - time.monotonic())

    @property
    def serving(self) -> bool:
        """Whether requests may go there, were it not for a moment of cooling down."""
        return self.health is Health.UP and not self.draining

    @property
    def ready(self) -> bool:
        """Whether a request may go there now."""
        return self.serving and self._cool_until <= time.monotonic()

    @property
    def failures(self) -> int:
        """How often it has failed; a check that begins notes it, see :meth:`passed`."""
        return self._failures

    def expected(self, hit_rate: float, isl: int) -> None:
        """A request was placed here of which so much is expected in the cache."""
        self.hit_tokens += round(hit_rate * isl)
        self.prompt_tokens += isl

    def cool_down(self, seconds: float) -> None:
        """It has answered that it is busy: nothing goes there for so long."""
        self._cool_until = max(self._cool_until, time.monotonic() + seconds)

    def fail(self, why: str) -> None:
        """A request or a check has failed: nothing goes there until a check passes."""
        self._failures += 1
        self.health = Health.DOWN
        self.why = why
        self.look.set()

    def passed(self, failures_before: int) -> bool:
        """A check has passed that began after so many failures: whether it counts."""
        if failures_before != self._failures:
            return False
        self.health = Health.UP
        self.why = ""
        return True
