# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""All engines of a process for one pool and one GPU share the registration of the pool.

So registered memory counts once for the host's cap, although a connector has one engine for loads
and one for saves. The registration ends with the last engine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beluga.pool import Pool
    from beluga.transfer.engines.cuda.driver import Driver
    from beluga.transfer.engines.cuda.registrar import Registrar

_Key = tuple[int, str, str, str]

_lock = threading.Lock()  # held while a registration ends, before the next one
_there: dict[_Key, tuple[Registrar, set[object]]] = {}


def join(driver: Driver, pool: Pool, user: object, make: Callable[[], Registrar]) -> Registrar:
    """Return this process's registrar of the pool and GPU, made by ``make`` if there is none.

    ``user`` counts as a user until :func:`leave`.
    """
    key = (os.getpid(), driver.name, driver.identity, pool.id)
    with _lock:
        if key not in _there:
            _there[key] = (make(), set())
        registrar, users = _there[key]
        users.add(user)
        return registrar


def leave(registrar: Registrar, user: object) -> None:
    """Remove a user without work in progress. The last one closes the registrar."""
    with _lock:
        registrar.forget(user)
        (key,) = (key for key, (found, _) in _there.items() if found is registrar)
        users = _there[key][1]
        users.discard(user)
        if not users:
            del _there[key]
            registrar.close()
