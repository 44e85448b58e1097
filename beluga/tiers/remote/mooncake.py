# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Objects in Mooncake Store.

The store's memory belongs to processes of its own (``mooncake_client``): this process gives none,
so that blocks outlive it. Its client library listens on all addresses of the host, unless the
environment's MC_TCP_BIND_ADDRESS names one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qsl

from beluga.errors import TierError

from .settings import RemoteSettings
from .store import Contents, RefusedError

_PACKAGE = "mooncake-transfer-engine"
_ABSENT = (-703, -704)  # it is being written, or there is none
_FULL = -200
_INVALID = (-10, -400, -600)  # the buffer is too small for it, its name, its size
_DEFAULTS = {
    "local": "127.0.0.1",
    "metadata": "P2PHANDSHAKE",
    "protocol": "tcp",
    "device": "",
    "buffer": str(256 << 20),
}


class MooncakeStore:
    """A client of Mooncake Store. It connects with the first operation."""

    batch = 512
    threads = 8

    def __init__(self, url: SplitResult, settings: RemoteSettings) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise TierError(f"mooncake:// needs {_PACKAGE}: pip install {_PACKAGE}") from error
        options = dict(parse_qsl(url.query, keep_blank_values=True))
        if unknown := options.keys() - _DEFAULTS:
            raise TierError(f"mooncake:// has no option {', '.join(sorted(unknown))}")
        if not url.hostname or not url.port:
            raise TierError("Mooncake Store is named by its master: mooncake://HOST:PORT")
        self._options = _DEFAULTS | options
        if not self._options["buffer"].isdecimal():
            raise TierError("the option buffer of mooncake:// is a number of bytes")
        self._master = f"{url.hostname}:{url.port}"
        self._make, self._limit = MooncakeDistributedStore, settings.object_bytes
        self._lock = threading.Lock()
        self._connected: Any = None

    def get(self, name: str) -> Contents | None:
        """Return an object, or None."""
        client = self._client()
        size = client.get_size(name)
        if size in _ABSENT:
            return None
        if size > self._limit:
            raise RefusedError(f"an object of {size} bytes is too large")
        found: bytes = client.get(name) if size >= 0 else b""
        if len(found) != size:
            raise ConnectionError(f"get: {len(found)} bytes of {size}")
        return found

    def put(self, name: str, data: memoryview) -> None:
        """Store an object."""
        status = self._client().upsert(name, data)
        if status == _FULL:
            raise RefusedError("the store is full")
        if status in _INVALID:
            raise RefusedError(f"it takes no object of {len(data)} bytes: status {status}")
        if status:
            raise ConnectionError(f"put: status {status}")

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which of the objects exist, by one exchange."""
        found = self._client().batch_is_exist(list(names))
        if any(each < 0 for each in found):
            raise ConnectionError(f"exists: status {min(found)}")
        return [bool(each) for each in found]

    def delete(self, names: Sequence[str]) -> int:
        """Delete objects, and return how many there were."""
        client = self._client()
        removed = [client.remove(name, True) for name in names]  # also if somebody reads it
        if failed := [status for status in removed if status and status not in _ABSENT]:
            raise ConnectionError(f"delete: status {failed[0]}")
        return removed.count(0)

    def close(self) -> None:
        """Leave the store."""
        if self._connected is not None:
            self._connected.close()

    def _client(self) -> Any:
        with self._lock:
            if self._connected is None:
                option = self._options
                made = self._make()
                status = made.setup(
                    option["local"],
                    option["metadata"],
                    0,
                    int(option["buffer"]),
                    option["protocol"],
                    option["device"],
                    self._master,
                )
                if status:
                    raise ConnectionError(f"setup: status {status}")
                self._connected = made
            return self._connected
