# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An engine's standing, from the results of single requests.

A busy response (429, 503) may be due to one client's rate limit, and an engine may abort because of
one client's prompt. So a failed request keeps only its own client away from the engine, if that
client has another one. All clients are kept away only if a second client gets the same without a
success in between, and even then one request per second is sent: its success ends the pause.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Mapping

PROBE_S = 1.0
"""Seconds for which a busy engine gets no request at all, whatever pause it requests."""
ACCUSED_S = 60.0
"""Interval at which one client's requests may suspend an engine until a check has passed."""
BROKEN_S = 5.0
"""Seconds for which a client is kept away from an engine that aborted its request."""
CLIENTS_MAX = 1024
"""The number of remembered clients per engine."""

_KEY = os.urandom(16)


def client_of(headers: Mapping[str, str], remote: str | None) -> str:
    """Identify the sender of a request: a digest of its API key, or else its address."""
    secret = headers.get("Authorization") or headers.get("X-Api-Key")
    if not secret:
        return remote or ""
    return hashlib.blake2b(secret.encode(errors="replace"), key=_KEY, digest_size=16).hexdigest()


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
    """The results of the last requests to one engine."""

    def __init__(self) -> None:
        self._kept_away = _Until()
        self._accusers = _Until()
        self._refused: set[str] = set()  # clients with a busy response since the last success

    @property
    def is_busy(self) -> bool:
        """Whether several clients got busy responses without a success in between."""
        return len(self._refused) > 1

    def avoided_by(self, client: str) -> bool:
        """Whether this client should use another engine."""
        return client in self._kept_away

    def busy(self, client: str, pause_s: float) -> None:
        """Record that the engine was too busy for a client's request."""
        self._kept_away.note(client, time.monotonic() + pause_s)
        if not self.is_busy:
            self._refused.add(client)

    def served(self) -> None:
        """Record that the engine has accepted a request."""
        self._refused.clear()

    def broke_off(self, client: str) -> bool:
        """Record that the engine aborted a client's request. Returns whether this is a reason to
        suspend the engine; not for a client whose requests were the reason before.
        """
        now = time.monotonic()
        self._kept_away.note(client, now + BROKEN_S)
        if client in self._accusers:
            return False
        self._accusers.note(client, now + ACCUSED_S)
        return True
