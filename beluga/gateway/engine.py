# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An engine of the gateway: its address, its models, and whether it may get requests.

::

    STARTING --check passes--> UP --request fails, check fails--> DOWN --check passes--> UP

A check counts only if no request has failed since it started, because it may have observed an older
state. ``Standing`` handles failures that one client's request may have caused.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from beluga.gateway.settings import EngineSpec
from beluga.router import Worker

PROBE_S = 1.0
"""Seconds for which a busy engine gets no request at all, whatever pause it requests."""
ACCUSED_S = 60.0
"""Interval at which one client's requests may suspend an engine until a check has passed."""
BROKEN_S = 5.0
"""Seconds for which a client is kept away from an engine that aborted its request."""
CLIENTS_MAX = 1024
"""The number of remembered clients per engine."""

_KEY = os.urandom(16)


class GatewayClient(NamedTuple):
    """The sender of a request: a digest of its API key, or else its address; and its address."""

    name: str = ""
    address: str = ""


NOBODY = GatewayClient()


def client_of(headers: Mapping[str, str], remote: str | None) -> GatewayClient:
    """Identify the sender of a request."""
    address = remote or ""
    secret = headers.get("Authorization") or headers.get("X-Api-Key")
    if not secret:
        return GatewayClient(address, address)
    digest = hashlib.blake2b(secret.encode(errors="replace"), key=_KEY, digest_size=16)
    return GatewayClient(digest.hexdigest(), address)


class _Until:
    """Names with an expiry time; the oldest are dropped beyond a limit."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, float] = OrderedDict()

    def note(self, name: str, until: float) -> None:
        self._times[name] = max(until, self._times.pop(name, 0.0))
        if len(self._times) > CLIENTS_MAX:
            self._times.popitem(last=False)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._times.get(name, 0.0) > time.monotonic()


class Standing:
    """The results of the last requests to one engine.

    A busy response (429, 503) may be due to one client's rate limit, and an engine may abort
    because of one client's prompt. So a failed request keeps only its own client away from the
    engine, if that client has another one. All clients are kept away only if a second client gets
    the same response without a success in between, and even then one request per second is sent:
    its success ends the pause.

    A client may have any number of keys. So what several clients of one address cause keeps away
    the clients of that address, and counts as one client's for all others.
    """

    def __init__(self) -> None:
        self._avoiding = _Until()  # names of clients
        self._avoiding_addresses = _Until()
        self._accusers = _Until()  # names of clients
        self._accusers_addresses = _Until()
        # Clients with a busy response since the last success: two of one address, or of two
        self._refused: list[GatewayClient] = []

    @property
    def is_busy(self) -> bool:
        """Whether clients of several addresses got busy responses without a success in between."""
        return len({client.address for client in self._refused}) > 1

    def avoided_by(self, client: GatewayClient) -> bool:
        """Whether this client should use another engine."""
        return client.name in self._avoiding or client.address in self._avoiding_addresses

    def busy(self, client: GatewayClient, pause_s: float) -> None:
        """Record that the engine was too busy for a client's request."""
        now = time.monotonic()
        self._avoiding.note(client.name, now + pause_s)
        if self.is_busy:
            return
        if any(other.name == client.name for other in self._refused):
            return
        if any(other.address == client.address for other in self._refused):
            self._avoiding_addresses.note(client.address, now + min(pause_s, PROBE_S))
            return
        self._refused.append(client)

    def served(self) -> None:
        """Record that the engine has accepted a request."""
        self._refused.clear()

    def broke_off(self, client: GatewayClient) -> bool:
        """Record that the engine aborted a client's request. Returns whether this is a reason to
        suspend the engine; not for a client or an address whose requests were the reason before.
        """
        now = time.monotonic()
        self._avoiding.note(client.name, now + BROKEN_S)
        if client.name in self._accusers or client.address in self._accusers_addresses:
            return False
        self._accusers.note(client.name, now + ACCUSED_S)
        self._accusers_addresses.note(client.address, now + ACCUSED_S)
        return True


PROBLEMS = ("events", "block_size", "tokenizer", "template", "metrics", "pool")
"""The kinds of problems that prevent the router from following an engine: see ``problems.py``."""


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
        self.removed = False  # whether it was removed; its running requests continue to their end
        self.inflight = 0
        self.hit_tokens = self.prompt_tokens = 0  # totals of all requests; expected hits
        self.block_size = 0  # tokens, from its metrics; 0 if unknown
        self.space: int | None = None  # of its blocks in the pool, from its metrics
        self.ranks = 1  # data-parallel ranks, from its metrics
        self.started_s: float | None = None  # start of its process, from its metrics
        self.kind = ""  # kind of engine, from its metrics
        self.load_problem = ""  # why its metrics could not be read
        self.problems: dict[str, str] = {}  # by kind: see problems.py
        self.token_problems: dict[str, str] = {}  # see tokenizers.py
        self.probed_after = -1  # the number of failures at the last probe
        self.look = asyncio.Event()  # set to request a check now
        # It aborted a response, and the next check decides whether it is down
        self.suspected = False
        self._failures = 0
        self._cool_until = 0.0  # monotonic
        self._standing = Standing()

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def cards(self) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``, once it has been read."""
        return self._cards

    @cards.setter
    def cards(self, cards: list[dict[str, Any]]) -> None:
        # Each request needs these names, and an engine may have a thousand adapters.
        self._cards = cards
        self._listed = tuple(str(card.get("id")) for card in cards)
        self.adapters = frozenset(str(card.get("id")) for card in cards if card.get("parent"))

    @property
    def models(self) -> tuple[str, ...]:
        """Its models: the configured ones, or those that it lists."""
        return self.spec.models or self._listed

    @property
    def cooling_s(self) -> float:
        """Seconds for which it gets no requests, because it is busy."""
        return max(0.0, self._cool_until - time.monotonic())

    @property
    def serving(self) -> bool:
        """Whether it may get requests, except for a pause while it is busy."""
        return self.health is Health.UP and not self.draining

    @property
    def ready(self) -> bool:
        """Whether it may get a request now."""
        return self.serving and self._cool_until <= time.monotonic()

    @property
    def failures(self) -> int:
        """Its number of failures. A check records it at its start; see :meth:`passed`."""
        return self._failures

    def expected(self, hit_rate: float, isl: int) -> None:
        """Record that a request was placed here, with its expected hit rate."""
        self.hit_tokens += round(hit_rate * isl)
        self.prompt_tokens += isl

    def avoided_by(self, client: GatewayClient) -> bool:
        """Whether this client should use another engine, because of its recent requests."""
        return self._standing.avoided_by(client)

    def placed(self) -> None:
        """Record that it gets a request. If it is busy, this is the only one for a while."""
        if self._standing.is_busy:
            self.cool_down(PROBE_S)

    def answered(self, status: int) -> None:
        """Record that it responded with this status, so it is not busy."""
        if status < 500:
            self._standing.served()
            self._cool_until = 0.0

    def busy(self, client: GatewayClient, pause_s: float) -> None:
        """Record that it was too busy for a client's request, and requested a pause."""
        self._standing.busy(client, pause_s)
        if self._standing.is_busy:
            self.cool_down(min(pause_s, PROBE_S))

    def cool_down(self, seconds: float) -> None:
        """Send it no requests for this many seconds."""
        self._cool_until = max(self._cool_until, time.monotonic() + seconds)

    def broke_off(self, client: GatewayClient, why: str) -> None:
        """Record that it aborted a client's request. It gets no requests until a check, which
        starts at once, has passed. If this client's requests also caused the previous abort, they
        may be the problem, and the engine stays in use.
        """
        if self._standing.broke_off(client):
            self.fail(why)
            self.suspected = True
        self.look.set()

    def fail(self, why: str) -> None:
        """Record that it is unreachable, or that a check has failed. The engine gets no requests
        until a check passes.
        """
        self._failures += 1
        self.suspected = False
        self.health = Health.DOWN
        self.why = why
        self.look.set()

    def passed(self, failures_before: int) -> bool:
        """Record a passed check that started after this number of failures. Returns whether it
        counts.
        """
        if failures_before != self._failures:
            return False
        if self.health is not Health.UP and not self.suspected:
            self._standing = Standing()  # the engine was down, so this is a new process
        self.suspected = False
        self.health = Health.UP
        self.why = ""
        return True
