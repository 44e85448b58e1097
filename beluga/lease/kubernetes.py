# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A lease in Kubernetes: a coordination.k8s.io/v1 Lease, with the pod's service account.

It works as client-go does: clocks of different machines are never compared. A holder counts as gone
when its record has not changed for the lease's duration by the *local* clock. A write includes the
version of the record that was read, and the API server rejects all but the first write.
"""

from __future__ import annotations

import os
import ssl
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from beluga.config import kubernetes_api
from beluga.errors import LeaseError
from beluga.lease.http import JsonService
from beluga.text import read_text

DURATION_S = 5
CALL_TIMEOUT_S = 2.0
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_RETRY_S = 0.2
_OK, _CREATED, _ABSENT, _CONFLICT = 200, 201, 404, 409


class KubernetesLease:
    """A lease that belongs to the ``holderIdentity`` of the Lease at ``place``: namespace/name.

    ``server`` is the API server, by default the one of the pod's environment. Raises
    :class:`~beluga.errors.LeaseError` if there is none because this is not a pod.
    """

    def __init__(
        self,
        place: str,
        *,
        server: str = "",
        account: Path = ACCOUNT,
        duration_s: int = DURATION_S,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        namespace, _, name = place.partition("/")
        context = None
        if not server:
            server = kubernetes_api()
            if not server:
                raise LeaseError("no Kubernetes here: KUBERNETES_SERVICE_HOST is not set")
            try:
                context = ssl.create_default_context(cafile=account / "ca.crt")
            except OSError as error:
                raise LeaseError(f"the service account has no certificate: {error}") from None
        self._service = JsonService(server, timeout_s=timeout_s, context=context)
        self._token = account / "token"
        self._last_token = ""
        self._list = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._duration_s = duration_s
        self._self = f"beluga-{os.uname().nodename}-{uuid.uuid4()}"
        self._seen: tuple[str, float] = ("", 0.0)  # a record's version, and when it was first seen
        self._until = 0.0

    def acquire(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds until no other process holds the lease. Returns
        whether it is held now.
        """
        end = time.monotonic() + timeout_s
        while not self._take():
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_RETRY_S, left))
        return True

    def renew(self) -> bool:
        """Extend the lease by ``duration_s`` and return whether it is held. While the API server is
        unreachable, it counts as held until it expires.
        """
        start = time.monotonic()
        try:
            lease = self._read()
            if lease is None or _holder(lease) != self._self:
                self._until = 0.0
                return False
            if self._write(lease, self._self):
                self._until = start + self._duration_s
        except LeaseError:
            pass
        return time.monotonic() < self._until

    def release(self) -> None:
        """Release the lease at once. If the API server does not answer, the lease expires by
        itself.
        """
        self._until = 0.0
        try:
            lease = self._read()
            if lease is not None and _holder(lease) == self._self:
                self._write(lease, "")
        except LeaseError:
            return

    def _take(self) -> bool:
        start = time.monotonic()
        lease = self._read()
        if lease is None:
            taken = self._create()
        elif _holder(lease) in ("", self._self) or self._is_expired(lease):
            taken = self._write(lease, self._self)
        else:
            taken = False
        if taken:
            self._until = start + self._duration_s
        return taken

    def _is_expired(self, lease: dict[str, Any]) -> bool:
        version = str(lease.get("metadata", {}).get("resourceVersion", ""))
        now = time.monotonic()
        if version != self._seen[0]:
            self._seen = (version, now)
        lasts_s = float(lease["spec"].get("leaseDurationSeconds") or self._duration_s)
        return now - self._seen[1] > lasts_s

    def _read(self) -> dict[str, Any] | None:
        status, answer = self._request("GET", f"{self._list}/{self._name}")
        if status == _ABSENT:
            return None
        parts = [answer.get(name) for name in ("metadata", "spec")]
        if status != _OK or not all(isinstance(part, dict) for part in parts):
            raise LeaseError(f"Kubernetes denies reading the lease: {_reason(status, answer)}")
        return answer

    def _create(self) -> bool:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": self._spec({}, self._self),
        }
        return self._done(*self._request("POST", self._list, body))

    def _write(self, lease: dict[str, Any], holder: str) -> bool:
        body = {**lease, "spec": self._spec(lease["spec"], holder)}
        return self._done(*self._request("PUT", f"{self._list}/{self._name}", body))

    def _spec(self, old: dict[str, Any], holder: str) -> dict[str, Any]:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        changed = old.get("holderIdentity") != holder
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": self._duration_s,
            "acquireTime": now if changed else old.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (changed and bool(holder)),
        }

    def _done(self, status: int, answer: dict[str, Any]) -> bool:
        if status in (_OK, _CREATED):
            return True
        if status in (_ABSENT, _CONFLICT):
            return False  # another process was faster
        raise LeaseError(f"Kubernetes refuses the lease: {_reason(status, answer)}")

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        # It is read each time, because Kubernetes replaces it. While it is written, it is empty.
        why = "it is empty"
        try:
            self._last_token = read_text(self._token).strip() or self._last_token
        except (OSError, UnicodeDecodeError) as error:
            why = str(error)
        if not self._last_token:
            raise LeaseError(f"the service account has no token: {why}")
        return self._service.request(method, path, body, token=f"Bearer {self._last_token}")


def _holder(lease: dict[str, Any]) -> str:
    return str(lease["spec"].get("holderIdentity") or "")


def _reason(status: int, answer: dict[str, Any]) -> str:
    return f"{status} {answer.get('message', '')}".rstrip()
