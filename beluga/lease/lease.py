# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a lease is, and which one a URL names."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urlsplit

from beluga.errors import LeaseError
from beluga.lease.etcd import EtcdLease
from beluga.lease.kubernetes import KubernetesLease

ETCD_PORT = 2379


class Lease(Protocol):
    """Held by one process at a time, and lost by itself when nobody renews it.

    All calls raise :class:`~beluga.errors.LeaseError` when the lock's service refuses them.
    """

    def acquire(self, timeout_s: float) -> bool:
        """Wait for it at most so many seconds: whether it is held."""

    def renew(self) -> bool:
        """Keep it a while longer: whether it is still held."""

    def release(self) -> None:
        """Give it up, so that others need not wait for its end."""


def open_lease(url: str) -> Lease:
    """The lease that ``url`` names; nobody is asked yet.

    Raises :class:`~beluga.errors.LeaseError` for a URL that cannot be read, or outside of a pod.
    """
    parts = urlsplit(url)
    name = parts.path.strip("/")
    try:
        host, port = parts.hostname or "127.0.0.1", parts.port or ETCD_PORT
    except ValueError as error:
        raise LeaseError(f"{url}: {error}") from None
    if parts.scheme == "etcd" and name:
        place = f"[{host}]" if ":" in host else host
        return EtcdLease(f"http://{place}:{port}", name)
    if parts.scheme == "k8s" and parts.netloc and name and "/" not in name:
        return KubernetesLease(f"{parts.netloc}/{name}")
    raise LeaseError(f"{url}: a lease is etcd://host:port/name or k8s://namespace/name")
