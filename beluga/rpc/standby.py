# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A standby server: it waits to take over, and may need a lock outside the pool to do so."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from beluga.errors import LeaseError, RpcError, ServerAliveError
from beluga.threads import Thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from beluga.lease import Lease
    from beluga.rpc.server import Server

log = logging.getLogger(__name__)

SILENT_S = 2.0
"""A server of another machine is replaced when its heartbeat has not moved for so many seconds.

One of this machine whose process lives is replaced after 15 times as long.
"""

_LOOK_S = 0.2
_RETRY_S = 0.1
_RENEWALS_PER_S = 2.0


def stand_by(
    server: Server,
    told: threading.Event,
    *,
    silent_s: float = SILENT_S,
    lease: Lease | None = None,
    waits: Callable[[str], None] = lambda why: None,
) -> bool:
    """Watch the pool's server until ``server`` has taken over, or until ``told`` is set.

    Returns True after the takeover, when ``server`` has been started, and False once ``told`` is
    set. A server of this machine is followed within milliseconds of its death. A server of another
    machine is followed after ``silent_s`` seconds, one of this machine that hangs after 15 times as
    long. With ``lease`` the takeover happens only while the lease is held, and the lease is renewed
    meanwhile; if the lease cannot be checked, the wait continues.

    ``waits`` is called after each look that led to no takeover, with the reason if there is another
    one than that the pool has a server.

    Raises the errors of :meth:`Server.start`, except :class:`~beluga.errors.ServerAliveError`:
    after that one it continues to watch. Raises :class:`~beluga.errors.LeaseError` if the lease was
    lost during the takeover: then ``server`` has stopped, and cannot be started again.
    """
    refused = ""
    while not told.is_set():
        if not server.watch(_LOOK_S, silent_s=silent_s):
            waits("")
            continue
        try:
            if lease is not None and not lease.acquire(_LOOK_S):
                waits("another process holds the lease")
                continue
            # A takeover of a large pool takes longer than a lease lives.
            with nullcontext() if lease is None else _Renewals(server, lease):
                server.start()
        except (LeaseError, ServerAliveError) as error:
            if lease is not None:
                lease.release()
            if str(error) != refused:
                log.warning("not taken over yet: %s", error)
                refused = str(error)
            waits(refused)
            told.wait(_RETRY_S)
            continue
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        if lease is not None and server.failure is not None:  # it took over for nobody
            server.stop()
            lease.release()
            raise server.failure
        return True
    return False


class _Renewals:
    """Renews a lease on its own thread, and makes the server fail when the lease is lost. It is a
    context manager.
    """

    def __init__(self, server: Server, lease: Lease) -> None:
        self._server = server
        self._lease = lease
        self._over = threading.Event()
        self._thread = Thread(target=self._keep, name="beluga-lease", daemon=True)

    def _keep(self) -> None:
        while not self._over.wait(1 / _RENEWALS_PER_S):
            if not self._renewed():
                with suppress(RpcError):  # the server has stopped already
                    self._server.fail(LeaseError("the lease is lost; this server has stopped"))
                return

    def _renewed(self) -> bool:
        try:
            return self._lease.renew()
        except Exception:
            log.exception("renewing the lease")
            return False

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Keeper:
    """Renews a lease on its own thread and stops the server when the lease is lost.

    It is a context manager. At its end the server stops first, and then the lease is released.
    """

    def __init__(self, server: Server, lease: Lease) -> None:
        self._server = server
        self._lease = lease
        self._renewals = _Renewals(server, lease)

    def __enter__(self) -> Keeper:
        self._renewals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._server.stop()
        finally:
            self._renewals.__exit__()
            self._lease.release()
