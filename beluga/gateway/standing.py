# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An engine's standing, from the results of single requests.

A busy response (429, 503) may be due to one client's rate limit, and an engine may abort because of
one client's prompt. So a failed request keeps only its own client away from the engine, if that
client has another one. All clients are kept away only if a second client gets the same response
without a success in between, and even then one request per second is sent: its success ends the
pause.

A client may have any number of keys. So what several clients of one address cause keeps away the
clients of that address, and counts as one client's for all others.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

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
    """The results of the last requests to one engine."""

    def __init__(self) -> None:
        self._kept_away = _Until()  # names of clients
        self._kept_away_addresses = _Until()
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
        return client.name in self._kept_away or client.address in self._kept_away_addresses

    def busy(self, client: GatewayClient, pause_s: float) -> None:
        """Record that the engine was too busy for a client's request."""
        now = time.monotonic()
        self._kept_away.note(client.name, now + pause_s)
        if self.is_busy:
            return
        if any(one.name == client.name for one in self._refused):
            return
        if any(one.address == client.address for one in self._refused):
            self._kept_away_addresses.note(client.address, now + min(pause_s, PROBE_S))
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
        self._kept_away.note(client.name, now + BROKEN_S)
        if client.name in self._accusers or client.address in self._accusers_addresses:
            return False
        self._accusers.note(client.name, now + ACCUSED_S)
        self._accusers_addresses.note(client.address, now + ACCUSED_S)
        return True
