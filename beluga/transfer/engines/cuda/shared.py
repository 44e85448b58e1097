# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One registration of a pool for all engines that a process has on one GPU.

What is registered counts to the host's cap once, whoever else of the process copies: loads and
saves of a connector have an engine each. The last to leave ends it.
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

_lock = threading.Lock()  # held while one is ended: the memory may be registered anew after that
_there: dict[_Key, tuple[Registrar, set[object]]] = {}


def join(driver: Driver, pool: Pool, user: object, make: Callable[[], Registrar]) -> Registrar:
    """The registrar of this pool and GPU in this process, made if there is none; ``user`` is one
    more that uses it, until :func:`leave`."""
    key = (os.getpid(), driver.name, driver.identity, pool.id)
    with _lock:
        if key not in _there:
            _there[key] = (make(), set())
        registrar, users = _there[key]
        users.add(user)
        return registrar


def leave(registrar: Registrar, user: object) -> None:
    """Nothing of the user's is under way. With the last one the registrar is closed."""
    with _lock:
        registrar.forget(user)
        (key,) = (key for key, (found, _) in _there.items() if found is registrar)
        users = _there[key][1]
        users.discard(user)
        if not users:
            del _there[key]
            registrar.close()
