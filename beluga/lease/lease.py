# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface of a lease, and the lease of a URL."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urlsplit

from beluga.errors import LeaseError
from beluga.lease.etcd import EtcdLease
from beluga.lease.kubernetes import KubernetesLease
from beluga.listening import shown_url

ETCD_PORT = 2379
_ETCD = {"etcd": "http", "etcds": "https"}


class Lease(Protocol):
    """A lock that one process holds at a time, and that expires unless it is renewed.

    All calls raise :class:`~beluga.errors.LeaseError` when the lock's service refuses them.
    """

    def acquire(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for the lease. Returns whether it is held now."""

    def renew(self) -> bool:
        """Extend the lease. Returns whether it is still held."""

    def release(self) -> None:
        """Release the lease, so that other processes need not wait until it expires."""


def open_lease(url: str) -> Lease:
    """Return the lease of ``url``. No request is sent yet.

    Raises :class:`~beluga.errors.LeaseError` for a URL that is not valid, or outside of a pod.
    """
    if "@" in url:
        raise LeaseError(
            f"{shown_url(url)}: the URL must not contain a user; set ETCDCTL_USER and "
            "ETCDCTL_PASSWORD"
        )
    try:
        parts = urlsplit(url)
        name = parts.path.strip("/")
        if parts.scheme in _ETCD and name:
            places = [_place(place) for place in parts.netloc.split(",")]
            return EtcdLease([f"{_ETCD[parts.scheme]}://{place}" for place in places], name)
    except ValueError as error:
        raise LeaseError(f"{shown_url(url)}: {error}") from None
    if parts.scheme == "k8s" and parts.netloc and name and "/" not in name:
        return KubernetesLease(f"{parts.netloc}/{name}")
    raise LeaseError(
        f"{shown_url(url)!r} is not a lease; give etcd://host:port/name, "
        "etcd://host,host,host/name, etcds://... (TLS) or k8s://namespace/name"
    )


def _place(text: str) -> str:
    """Return the host and port of one endpoint. Raises ValueError for bad ones."""
    parts = urlsplit(f"//{text}")
    host, port = parts.hostname or "127.0.0.1", parts.port or ETCD_PORT
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
