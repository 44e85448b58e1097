# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server that waits for its turn, and the lock outside the pool that it may have to hold."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from beluga.errors import LeaseError, ServerAliveError

if TYPE_CHECKING:
    from beluga.lease import Lease
    from beluga.rpc.server import Server

log = logging.getLogger(__name__)

SILENT_S = 2.0
"""A heartbeat that stands still so long is one of a server that another machine may follow."""

_LOOK_S = 0.2
_RETRY_S = 0.1
_RENEWALS_PER_S = 2.0


def stand_by(
    server: Server, told: threading.Event, *, silent_s: float = SILENT_S, lease: Lease | None = None
) -> bool:
    """Watch the pool's server until ``server`` has taken over: True; False once ``told`` is set.

    A server of this machine is followed within milliseconds of its death; one of another machine,
    or one that only stands still, after ``silent_s`` seconds. With ``lease``, only while that is
    held; while that cannot be asked, it waits on. ``server`` is started when this returns True.
    Raises what :meth:`Server.start` does, except for :class:`~beluga.errors.ServerAliveError`:
    then it goes on watching.
    """
    refused = ""
    while not told.is_set():
        if not server.watch(_LOOK_S, silent_s=silent_s):
            continue
        try:
            if lease is not None and not lease.acquire(_LOOK_S):
                continue
            server.start()
        except (LeaseError, ServerAliveError) as error:
            if lease is not None:
                lease.release()
            if str(error) != refused:
                log.warning("not taken over yet: %s", error)
                refused = str(error)
            told.wait(_RETRY_S)
            continue
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        return True
    return False


class Keeper:
    """Renews a lease beside a server, on a thread of its own, and stops the server when it is lost.

    A context manager: the lease is released at its end, after the server has stopped.
    """

    def __init__(self, server: Server, lease: Lease) -> None:
        self._server = server
        self._lease = lease
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="beluga-lease", daemon=True)

    def _keep(self) -> None:
        while not self._over.wait(1 / _RENEWALS_PER_S):
            if not self._renewed():
                self._server.fail(LeaseError("the lease is lost; this server has stopped"))
                return

    def _renewed(self) -> bool:
        try:
            return self._lease.renew()
        except Exception:
            log.exception("renewing the lease")
            return False

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._server.stop()
        self._lease.release()
