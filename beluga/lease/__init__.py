# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Leases: a lock outside the pool, for sites that already run etcd or Kubernetes.

A lease decides which process may *try* to become the pool's server, and nothing else. Two holders
at once are harmless, because epochs and halves in the pool separate them. Only the standard library
is used. A URL identifies the lease: ``etcd://host:port/name`` (by default this machine, port 2379;
``etcd://a,b,c/name`` for a cluster, ``etcds://`` for TLS) or ``k8s://namespace/name`` (inside a
pod, with its service account).
"""

from beluga.lease.etcd import EtcdLease
from beluga.lease.kubernetes import KubernetesLease
from beluga.lease.lease import Lease, open_lease

__all__ = ["EtcdLease", "KubernetesLease", "Lease", "open_lease"]
