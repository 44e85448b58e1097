# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A standby server. It waits to take over, and may require a lease outside the pool."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from beluga.choices import SILENT_S
from beluga.errors import LeaseError, RpcError, ServerAliveError
from beluga.threads import Thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from beluga.lease import Lease
    from beluga.rpc.server import Server

log = logging.getLogger(__name__)

_LOOK_S = 0.2
_RETRY_S = 0.1
_RENEWALS_PER_S = 2.0


def stand_by(
    server: Server,
    stopping: threading.Event,
    *,
    silent_s: float = SILENT_S,
    lease: Lease | None = None,
    waits: Callable[[str], None] = lambda why: None,
) -> bool:
    """Watch the pool's server until ``server`` has taken over or ``stopping`` is set.

    Returns True after the takeover, with ``server`` started, and False once ``stopping`` is set. A
    server of this machine is replaced within milliseconds of its death. A server of another machine
    is replaced after ``silent_s`` seconds without a heartbeat, a hanging one of this machine after
    15 times as long. With ``lease``, the takeover requires the lease, which is renewed meanwhile;
    while the lease cannot be checked, the wait continues.

    ``waits`` is called after each check without a takeover. Its argument is the reason, or empty if
    the pool simply has a server.

    Raises the errors of :meth:`Server.start` except :class:`~beluga.errors.ServerAliveError`, after
    which it continues to watch. Raises :class:`~beluga.errors.LeaseError` if the lease was lost
    during the takeover: ``server`` has then stopped and cannot be started again.
    """
    refused = ""
    while not stopping.is_set():
        if not server.watch(_LOOK_S, silent_s=silent_s):
            waits("")
            continue
        try:
            if lease is not None and not lease.acquire(_LOOK_S):
                waits("another process holds the lease")
                continue
            # The takeover of a large pool takes longer than a lease lasts, so renew it meanwhile.
            with nullcontext() if lease is None else _Renewals(server, lease):
                server.start()
        except (LeaseError, ServerAliveError) as error:
            if lease is not None:
                lease.release()
            if str(error) != refused:
                log.warning("the takeover failed, will retry: %s", error)
                refused = str(error)
            waits(refused)
            stopping.wait(_RETRY_S)
            continue
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        # The lease was lost during the takeover
        if lease is not None and server.failure is not None:
            server.stop()
            lease.release()
            raise server.failure
        return True
    return False


class _Renewals:
    """Context manager that renews a lease on its own thread and makes the server fail if it is
    lost.
    """

    def __init__(self, server: Server, lease: Lease) -> None:
        self._server = server
        self._lease = lease
        self._over = threading.Event()
        self._thread = Thread(target=self._keep, name="beluga-lease", daemon=True)

    def _keep(self) -> None:
        while not self._over.wait(1 / _RENEWALS_PER_S):
            if not self._renewed():
                with suppress(RpcError):  # the server has already stopped
                    self._server.fail(LeaseError("the lease is lost; this server has stopped"))
                return

    def _renewed(self) -> bool:
        try:
            return self._lease.renew()
        except Exception:
            log.exception("renewing the lease failed")
            return False

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class LeaseKeeper:
    """Context manager that renews a lease on its own thread and stops the server if it is lost.

    On exit it stops the server first and releases the lease second.
    """

    def __init__(self, server: Server, lease: Lease) -> None:
        self._server = server
        self._lease = lease
        self._renewals = _Renewals(server, lease)

    def __enter__(self) -> LeaseKeeper:
        self._renewals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._server.stop()
        finally:
            self._renewals.__exit__()
            self._lease.release()
