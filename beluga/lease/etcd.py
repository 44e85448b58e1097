# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A lease in etcd, over its JSON gateway: a key that exists as long as its etcd lease."""

from __future__ import annotations

import base64
import time
from typing import Any

from beluga.errors import LeaseError
from beluga.lease.http import JsonService

TTL_S = 5
CALL_TIMEOUT_S = 2.0
_RETRY_S = 0.2
_OK = 200


class EtcdLease:
    """A lease that belongs to the process that created the key ``name``, while its etcd lease
    lives.
    """

    def __init__(
        self, base: str, name: str, *, ttl_s: int = TTL_S, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        self._service = JsonService(base, timeout_s=timeout_s)
        self._key = _text(f"beluga/{name}")
        self._ttl_s = ttl_s
        self._lease = ""  # the etcd lease's ID; "" for none
        self._until = 0.0  # when etcd may give the key to others, by this machine's clock

    def acquire(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds until no other process holds the lease. Returns
        whether it is held now.
        """
        end = time.monotonic() + timeout_s
        while True:
            if self._take():
                return True
            left = end - time.monotonic()
            if left <= 0:
                self.release()
                return False
            time.sleep(min(_RETRY_S, left))

    def renew(self) -> bool:
        """Extend the lease by ``ttl_s`` and return whether it is held. While etcd is unreachable,
        it counts as held until it expires.
        """
        if not self._lease:
            return False
        start = time.monotonic()
        try:
            answer = self._ask("/v3/lease/keepalive", {"ID": self._lease}).get("result", {})
        except LeaseError:
            return time.monotonic() < self._until
        lives_s = float(answer.get("TTL", 0))
        if lives_s <= 0:
            self._lease = ""
            return False
        self._until = start + lives_s
        return True

    def release(self) -> None:
        """Give the lease up at once. If etcd does not answer, the lease expires by itself."""
        lease, self._lease, self._until = self._lease, "", 0.0
        if lease:
            try:
                self._ask("/v3/lease/revoke", {"ID": lease})
            except LeaseError:
                return

    def _take(self) -> bool:
        start = time.monotonic()
        if not self._lease or not self.renew():
            self._lease = str(self._ask("/v3/lease/grant", {"TTL": self._ttl_s}).get("ID", ""))
            if not self._lease:
                raise LeaseError("etcd granted no lease")
            self._until = start + self._ttl_s
        absent = {
            "target": "CREATE",
            "result": "EQUAL",
            "key": self._key,
            "create_revision": "0",
        }
        put = {"key": self._key, "value": _text("beluga"), "lease": self._lease}
        body = {"compare": [absent], "success": [{"requestPut": put}]}
        return self._ask("/v3/kv/txn", body).get("succeeded") is True

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = self._service.ask("POST", path, body)
        if status != _OK:
            raise LeaseError(f"etcd refuses {path}: {status} {answer.get('error', '')}".rstrip())
        return answer


def _text(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
