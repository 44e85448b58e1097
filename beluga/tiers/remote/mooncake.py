# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Objects in Mooncake Store.

The store's memory belongs to its own processes (``mooncake_client``). This process contributes
none, so blocks outlive it. The client library listens on all addresses of the host, unless the
environment variable MC_TCP_BIND_ADDRESS names one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qsl

from beluga.errors import TierError
from beluga.tiers.remote.store import Contents, RefusedError, RemoteSettings

_PACKAGE = "mooncake-transfer-engine"
_ABSENT = (-703, -704)  # the object is being written, or does not exist
_PRESENT = -705
_FULL = -200
_INVALID = (-10, -400, -600)  # the buffer is too small, or the name or the size is invalid
_DEFAULTS = {
    "local": "127.0.0.1",
    "metadata": "P2PHANDSHAKE",
    "protocol": "tcp",
    "device": "",
    "buffer": str(256 << 20),
}


class MooncakeStore:
    """A client of Mooncake Store. It connects at the first operation."""

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
            raise TierError("the URL of Mooncake Store names its master; give mooncake://HOST:PORT")
        self._options = _DEFAULTS | options
        if not self._options["buffer"].isdecimal():
            raise TierError(
                "the option buffer of mooncake:// is not a number; give a number of bytes"
            )
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
        contents: bytes = client.get(name) if size >= 0 else b""
        if len(contents) != size:
            raise ConnectionError(f"get returned {len(contents)} bytes instead of {size}")
        return contents

    def create(self, name: str, data: memoryview) -> None:
        """Store an object unless there is one of that name."""
        status = self._client().put(name, data)
        self._check(0 if status == _PRESENT else status, len(data))

    def put(self, name: str, data: memoryview) -> None:
        """Store an object."""
        self._check(self._client().upsert(name, data), len(data))

    def _check(self, status: int, size: int) -> None:
        if status == _FULL:
            raise RefusedError("the store is full")
        if status in _INVALID:
            raise RefusedError(
                f"the store does not take an object of {size} bytes: status {status}"
            )
        if status:
            raise ConnectionError(f"put: status {status}")

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which of the objects exist, with one request."""
        statuses = self._client().batch_is_exist(list(names))
        if any(status < 0 for status in statuses):
            raise ConnectionError(f"exists: status {min(statuses)}")
        return [bool(status) for status in statuses]

    def delete(self, names: Sequence[str]) -> int:
        """Delete objects. Returns how many there were."""
        client = self._client()
        # Remove it even while another client reads it
        removed = [client.remove(name, True) for name in names]
        if failed := [status for status in removed if status and status not in _ABSENT]:
            raise ConnectionError(f"delete: status {failed[0]}")
        return removed.count(0)

    def close(self) -> None:
        """Close the client."""
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
