# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A standby server, which waits to take over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from beluga.choices import SILENT_S
from beluga.errors import ServerAliveError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from beluga.rpc.server import Server

log = logging.getLogger(__name__)

_LOOK_S = 0.2
_RETRY_S = 0.1


def stand_by(
    server: Server,
    stopping: threading.Event,
    *,
    silent_s: float = SILENT_S,
    waits: Callable[[str], None] = lambda why: None,
) -> bool:
    """Watch the pool's server until ``server`` has taken over or ``stopping`` is set.

    Returns True after the takeover, with ``server`` started, and False once ``stopping`` is set. A
    server of this machine is replaced within milliseconds of its death. A server of another machine
    is replaced after ``silent_s`` seconds without a heartbeat, a hanging one of this machine after
    15 times as long.

    ``waits`` is called after each check without a takeover. Its argument is the reason, or empty if
    the pool simply has a server.

    Raises the errors of :meth:`Server.start` except :class:`~beluga.errors.ServerAliveError`, after
    which it continues to watch.
    """
    refused = ""
    while not stopping.is_set():
        if not server.watch(_LOOK_S, silent_s=silent_s):
            waits("")
            continue
        try:
            server.start()
        except ServerAliveError as error:
            if str(error) != refused:
                log.warning("the takeover failed, will retry: %s", error)
                refused = str(error)
            waits(refused)
            stopping.wait(_RETRY_S)
            continue
        return True
    return False
