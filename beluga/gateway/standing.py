# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An engine's standing: what the answers to single requests say of it.

A busy answer (429, 503) may be about one client's rate limit, and an engine may break off because
of one client's prompt. So a failed request keeps only its own client away from the engine, where
that client has another one. Everybody is kept away only if a second client gets the same with no
success in between, and then one request per second still goes through: its success ends the pause.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Mapping

PROBE_S = 1.0
"""How long a busy engine gets no request at all, whatever it asks for."""
ACCUSED_S = 60.0
"""How often one client's requests can make an engine get no others until a check has passed."""
BROKEN_S = 5.0
"""How long a client is kept away from an engine that broke off with its request."""
CLIENTS_MAX = 1024
"""How many clients are remembered for each engine."""

_KEY = os.urandom(16)


def client_of(headers: Mapping[str, str], remote: str | None) -> str:
    """Return who sends a request: a digest of its key, or else its address."""
    secret = headers.get("Authorization") or headers.get("X-Api-Key")
    if not secret:
        return remote or ""
    return hashlib.blake2b(secret.encode(errors="replace"), key=_KEY, digest_size=16).hexdigest()


class _Until:
    """Names until a time; the ones that were noted first are forgotten when there are too many."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, float] = OrderedDict()

    def note(self, name: str, until: float) -> None:
        self._times[name] = max(until, self._times.pop(name, 0.0))
        if len(self._times) > CLIENTS_MAX:
            self._times.popitem(last=False)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._times.get(name, 0.0) > time.monotonic()


class Standing:
    """What the last requests to one engine say of it."""

    def __init__(self) -> None:
        self._kept_away = _Until()
        self._accusers = _Until()
        self._refused: set[str] = set()  # clients that got a busy answer since the last success

    @property
    def is_busy(self) -> bool:
        """Whether several clients got busy answers, with no success in between."""
        return len(self._refused) > 1

    def avoided_by(self, client: str) -> bool:
        """Return whether this client is better served by another engine."""
        return client in self._kept_away

    def busy(self, client: str, pause_s: float) -> None:
        """Note that the engine was too busy for a client's request."""
        self._kept_away.note(client, time.monotonic() + pause_s)
        if not self.is_busy:
            self._refused.add(client)

    def served(self) -> None:
        """Note that the engine has taken a request."""
        self._refused.clear()

    def broke_off(self, client: str) -> bool:
        """Note that the engine broke off with a client's request. Returns whether this alone is a
        reason to doubt the engine: not again for a client whose requests were a reason before.
        """
        now = time.monotonic()
        self._kept_away.note(client, now + BROKEN_S)
        if client in self._accusers:
            return False
        self._accusers.note(client, now + ACCUSED_S)
        return True
