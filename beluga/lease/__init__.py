# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A lock outside the pool, for sites that have one already: etcd's, or a Kubernetes Lease.

It decides who may *try* to become the pool's server, and nothing else: two winners at once are
harmless, because epochs and halves in the pool make them so. Only the standard library is used.

``etcd://host:port/name`` (default: this machine, 2379), ``k8s://namespace/name`` (from inside a
pod, by its service account).
"""

from beluga.lease.etcd import EtcdLease
from beluga.lease.kubernetes import KubernetesLease
from beluga.lease.lease import Lease, open_lease

__all__ = ["EtcdLease", "KubernetesLease", "Lease", "open_lease"]
