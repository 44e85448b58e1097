# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A lease in etcd, over its JSON gateway: a key that exists as long as its etcd lease.

A cluster has several endpoints: a request goes to the one that answered last, and to the others if
it does not answer. They share one deadline, so that a renewal ends before its lease does. With a
user, etcd requires a token, which expires after some minutes: after a rejection a new one is
requested.
"""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Sequence
from typing import Any

from beluga.config import etcdctl
from beluga.errors import LeaseError
from beluga.lease.http import JsonService

TTL_S = 5
CALL_TIMEOUT_S = 2.0
_RETRY_S = 0.2
_OK, _UNAUTHENTICATED = 200, 401
_UNAVAILABLE = (500, 502, 503, 504)  # a member without a leader, or a proxy before it


class EtcdLease:
    """A lease that belongs to the process that created the key ``name``, until its etcd lease
    expires.

    ``bases`` are the endpoints of one cluster, such as ``http://10.0.0.1:2379``. ``timeout_s`` is
    the deadline of a call over all endpoints. Certificates and the user are those of etcdctl's
    environment. Raises :class:`~beluga.errors.LeaseError` if a certificate cannot be read.
    """

    def __init__(
        self,
        bases: str | Sequence[str],
        name: str,
        *,
        ttl_s: int = TTL_S,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        bases = (bases,) if isinstance(bases, str) else tuple(bases)
        context = _context() if any(base.startswith("https:") for base in bases) else None
        each_s = timeout_s / len(bases)
        self._services = [JsonService(base, timeout_s=each_s, context=context) for base in bases]
        self._user, self._password = _user()
        self._token = ""
        self._key = _text(f"beluga/{name}")
        self._ttl_s = ttl_s
        self._lease = ""  # the etcd lease's ID; "" for none
        self._until = 0.0  # when the lease expires, by this machine's clock

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
        or a proxy answers for it, the lease counts as held until it expires.
        """
        if not self._lease:
            return False
        start = time.monotonic()
        try:
            lives_s = _lives_s(self._request("/v3/lease/keepalive", {"ID": self._lease}))
        except LeaseError:
            return time.monotonic() < self._until
        if lives_s <= 0:
            self._lease = ""
            return False
        self._until = start + lives_s
        return True

    def release(self) -> None:
        """Release the lease at once. If etcd does not answer, the lease expires by itself."""
        lease, self._lease, self._until = self._lease, "", 0.0
        if lease:
            try:
                self._request("/v3/lease/revoke", {"ID": lease})
            except LeaseError:
                return

    def _take(self) -> bool:
        start = time.monotonic()
        if not self._lease or not self.renew():
            self._lease = str(self._request("/v3/lease/grant", {"TTL": self._ttl_s}).get("ID", ""))
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
        return self._request("/v3/kv/txn", body).get("succeeded") is True

    def _request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._user and not self._token:
            self._token = self._authenticated()
        status, answer = self._any(path, body)
        if self._user and (status == _UNAUTHENTICATED or "token" in _error(answer)):
            self._token = self._authenticated()  # the token has expired
            status, answer = self._any(path, body)
        if status != _OK:
            advice = _advice(_error(answer))
            raise LeaseError(f"etcd refuses {path}: {status} {_error(answer)}".rstrip() + advice)
        return answer

    def _authenticated(self) -> str:
        body = {"name": self._user, "password": self._password}
        self._token = ""
        status, answer = self._any("/v3/auth/authenticate", body)
        if status != _OK or not answer.get("token"):
            raise LeaseError(
                f"etcd refuses the user {self._user}: {status} {_error(answer)}".rstrip()
                + "; set ETCDCTL_USER and ETCDCTL_PASSWORD"
            )
        return str(answer["token"])

    def _any(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Send a request to the endpoint that answered last, then to the others. Raises LeaseError,
        with all reasons, if none answers.
        """
        reasons = []
        for _ in range(len(self._services)):
            try:
                status, answer = self._services[0].request("POST", path, body, token=self._token)
                if status not in _UNAVAILABLE or len(self._services) == 1:
                    return status, answer
                reasons.append(f"{self._services[0].base}: {status} {_error(answer)}".rstrip())
            except LeaseError as error:
                reasons.append(str(error))
            self._services.append(self._services.pop(0))
        raise LeaseError("; ".join(reasons))


def _lives_s(answer: dict[str, Any]) -> float:
    """Return for how many seconds a renewed lease lives; 0 if it has expired. Raises LeaseError if
    the answer is not etcd's.
    """
    result = answer.get("result")
    try:
        if isinstance(result, dict):
            return float(int(result.get("TTL", 0)))
    except (ValueError, TypeError, OverflowError):
        pass
    raise LeaseError("the answer to a renewal is not etcd's; check the address and its proxies")


def _error(answer: dict[str, Any]) -> str:
    return str(answer.get("error") or answer.get("message") or "")


def _advice(error: str) -> str:
    if "user name is empty" in error:
        return "; set ETCDCTL_USER and ETCDCTL_PASSWORD"
    return ""


def _user() -> tuple[str, str]:
    """Return the user of etcdctl's environment and the password; "" for none."""
    user, colon, password = etcdctl("USER").partition(":")
    return user, password if colon else etcdctl("PASSWORD")


def _context() -> ssl.SSLContext:
    """Return a context with the CA and client certificate of etcdctl's environment."""
    authority, certificate, key = (etcdctl(name) for name in ("CACERT", "CERT", "KEY"))
    if bool(certificate) != bool(key):
        raise LeaseError("ETCDCTL_CERT and ETCDCTL_KEY belong together; set both")
    try:
        context = ssl.create_default_context(cafile=authority or None)
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl's errors are of this kind
        files = " ".join(filter(None, (authority, certificate, key)))
        raise LeaseError(f"no TLS to etcd with {files}: {error}") from None
    return context


def _text(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
