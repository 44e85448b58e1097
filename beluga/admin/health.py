# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Liveness and readiness of a server, for Kubernetes or a load balancer.

``GET /healthz`` fails when the server makes no progress: its poll loop hangs, or a standby no
longer checks the active server. ``GET /readyz`` also fails while the server stands by: it is alive,
but does not serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

from beluga.admin.route import AdminRequest, AdminResponse, Routes

HEALTHZ, READYZ = "/healthz", "/readyz"
STILL_S = 15.0
"""A server without progress for this many seconds hangs."""


class ServerHealth:
    """The health of a server, recorded by its main thread and read by the routes on other threads.

    A server that is starting counts as alive: a takeover of a large pool, or of large lower tiers,
    takes time.
    """

    def __init__(
        self, still_s: float = STILL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._still_s, self._clock = still_s, clock
        self._moved_s: float | None = None
        self._serves = False

    def record_progress(self, *, serves: bool) -> None:
        """Record that the server has made progress, and whether it serves or stands by."""
        self._moved_s, self._serves = self._clock(), serves

    def record_start(self) -> None:
        """Record that the server is starting, which may take long."""
        self._moved_s, self._serves = None, False

    def routes(self) -> Routes:
        """Return the routes."""
        return {("GET", HEALTHZ): self._lives, ("GET", READYZ): self._ready}

    def _lives(self, _: AdminRequest) -> AdminResponse:
        moved_s = self._moved_s
        still_s = 0.0 if moved_s is None else self._clock() - moved_s
        if still_s < self._still_s:
            return AdminResponse(b"alive\n")
        return _failed(f"no progress for {still_s:.0f} s: the server's poll loop hangs")

    def _ready(self, request: AdminRequest) -> AdminResponse:
        lives = self._lives(request)
        if lives.status != HTTPStatus.OK:
            return lives
        return AdminResponse(b"serving\n") if self._serves else _failed("it does not serve yet")


def _failed(text: str) -> AdminResponse:
    return AdminResponse(f"{text}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
