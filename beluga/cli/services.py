# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The services in a server's process: the lower tiers, and the events."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from beluga.errors import BelugaError

_logger = logging.getLogger(__name__)

_PERIOD_S = 2.0  # interval of attempts to start a service


class RestartableService(Protocol):
    """A service that may be started again after a failed start."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Services:
    """The services of one server.

    With ``patient``, a service that fails to start does not end the server; :meth:`look_after`
    retries it. This is for a takeover from a hanging server, which may still hold a port or the
    pool's last lanes.
    """

    def __init__(self, services: Sequence[RestartableService], *, patient: bool) -> None:
        self._services, self._patient = tuple(services), patient
        # Services that have not started yet, and the reason
        self._late: dict[RestartableService, str] = {}
        self._tried_s = 0.0

    def start(self) -> None:
        """Start all services. Raises their errors, unless this is patient."""
        for service in self._services:
            if self._patient:
                self._try(service)
            else:
                service.start()

    def look_after(self) -> None:
        """Retry failed starts at intervals. Call this often."""
        if not self._late or time.monotonic() - self._tried_s < _PERIOD_S:
            return
        for service in tuple(self._late):
            self._try(service)

    def stop(self) -> None:
        """Stop all services in reverse order."""
        for service in reversed(self._services):
            service.stop()

    def _try(self, service: RestartableService) -> None:
        why = self._late.get(service)
        self._tried_s = time.monotonic()
        try:
            service.start()
        except BelugaError as error:
            self._late[service] = str(error)
            if why != str(error):
                _logger.warning(
                    "the pool is served without a service, whose start will be retried: %s", error
                )
            return
        if self._late.pop(service, None) is not None:
            _logger.warning("the service has now started; before: %s", why)
