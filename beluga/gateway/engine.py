# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An engine as the gateway sees it: its address, its models, and whether it may get requests.

::

    STARTING --check passes--> UP --request fails, check fails--> DOWN --check passes--> UP

A check counts only if no request has failed since it began, because it may have seen an older
state. What one client's request may have caused is judged by ``standing.py``.
"""

from __future__ import annotations

import asyncio
import enum
import time
from typing import Any

from beluga.gateway.settings import EngineSpec
from beluga.gateway.standing import PROBE_S, Standing
from beluga.router import Worker

PROBLEMS = ("events", "block_size", "tokenizer", "template", "metrics", "pool")
"""The kinds of what keeps the router from following an engine: see ``problems.py``."""


class Health(enum.Enum):
    """The result of the last check, or of a request since then."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"


class Engine:
    """One engine process, which may have several ranks behind one URL."""

    def __init__(self, worker: Worker, spec: EngineSpec) -> None:
        self.worker = worker
        self.spec = spec
        self.cards = []
        self.health = Health.STARTING
        self.why = "not checked yet"  # the reason why it is not up
        self.draining = False
        self.gone = False  # whether it has left; its running requests continue to their end
        self.inflight = 0
        self.hit_tokens = self.prompt_tokens = 0  # sums over all requests; hits as expected
        self.block_size = 0  # tokens, as its metrics say; 0 if they do not
        self.space: int | None = None  # of its blocks in the pool, as its metrics say
        self.ranks = 1  # data-parallel ranks, as its metrics say
        self.started_s: float | None = None  # when its process began, if its metrics say so
        self.kind = ""  # which engine it is, as its metrics say
        self.load_problem = ""  # why its metrics could not be read
        self.problems: dict[str, str] = {}  # by kind: see problems.py
        self.token_problems: dict[str, str] = {}  # those of them that probe.py has found
        self.probed_after = -1  # how many failures the engine had when it was probed
        self.look = asyncio.Event()  # set to request a check now
        self.suspected = False  # it broke off, and the next check says whether it is down
        self._failures = 0
        self._cool_until = 0.0  # monotonic
        self._standing = Standing()

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def cards(self) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``, once it was read."""
        return self._cards

    @cards.setter
    def cards(self, cards: list[dict[str, Any]]) -> None:
        # Each request asks for these names, and an engine may have a thousand adapters.
        self._cards = cards
        self._listed = tuple(str(card.get("id")) for card in cards)
        self.adapters = frozenset(str(card.get("id")) for card in cards if card.get("parent"))

    @property
    def models(self) -> tuple[str, ...]:
        """The models that it serves: the declared ones, or else those that it lists."""
        return self.spec.models or self._listed

    @property
    def cooling_s(self) -> float:
        """The seconds for which it gets no requests, because it is busy."""
        return max(0.0, self._cool_until - time.monotonic())

    @property
    def serving(self) -> bool:
        """Whether it may get requests, apart from a pause while it is busy."""
        return self.health is Health.UP and not self.draining

    @property
    def ready(self) -> bool:
        """Whether it may get a request now."""
        return self.serving and self._cool_until <= time.monotonic()

    @property
    def failures(self) -> int:
        """How often it has failed. A check remembers this when it begins; see :meth:`passed`."""
        return self._failures

    def expected(self, hit_rate: float, isl: int) -> None:
        """Note that a request was placed here, with its expected hit rate."""
        self.hit_tokens += round(hit_rate * isl)
        self.prompt_tokens += isl

    def avoided_by(self, client: str) -> bool:
        """Return whether another engine is better for this client, because of its last requests."""
        return self._standing.avoided_by(client)

    def placed(self) -> None:
        """Note that it gets a request. If it is busy, this is the only one for a while."""
        if self._standing.is_busy:
            self.cool_down(PROBE_S)

    def answered(self, status: int) -> None:
        """Note that it answered a request with this status, which says that it is not busy."""
        if status < 500:
            self._standing.served()
            self._cool_until = 0.0

    def busy(self, client: str, pause_s: float) -> None:
        """Note that it was too busy for a client's request, and asked for a pause."""
        self._standing.busy(client, pause_s)
        if self._standing.is_busy:
            self.cool_down(min(pause_s, PROBE_S))

    def cool_down(self, seconds: float) -> None:
        """Send it no requests for so many seconds."""
        self._cool_until = max(self._cool_until, time.monotonic() + seconds)

    def broke_off(self, client: str, why: str) -> None:
        """Note that it broke off with a client's request. It gets no requests until a check, which
        begins at once, has passed, unless this client's requests were the reason before: then they
        may be what it cannot do.
        """
        if self._standing.broke_off(client):
            self.fail(why)
            self.suspected = True
        self.look.set()

    def fail(self, why: str) -> None:
        """Note that it cannot be reached, or that a check has failed. The engine gets no requests
        until a check passes.
        """
        self._failures += 1
        self.suspected = False
        self.health = Health.DOWN
        self.why = why
        self.look.set()

    def passed(self, failures_before: int) -> bool:
        """Note that a check passed, which began after so many failures. Returns whether it
        counts.
        """
        if failures_before != self._failures:
            return False
        if self.health is not Health.UP and not self.suspected:
            self._standing = Standing()  # it was down, so it is another process now
        self.suspected = False
        self.health = Health.UP
        self.why = ""
        return True
