# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The remote tier: blocks in a store that several pools share, behind one small interface.

``store`` is the interface. ``objects`` (S3, GCS, Azure, a folder, memory), ``valkey`` (Valkey and
Redis) and ``mooncake`` (Mooncake Store) implement it over existing clients. ``tier`` turns a store
into a :class:`beluga.tiers.tier.LowerTier`: ``envelope`` encodes an object, ``breaker`` is the
circuit breaker, ``workers`` the threads. :func:`open_remote` opens a tier by its URL.
"""

from __future__ import annotations

from .breaker import Breaker
from .objects import no_panic, object_store
from .settings import RemoteSettings
from .store import ObjectStore, RefusedError
from .tier import RemoteTier
from .url import check_remote, open_remote, shown_remote, split_remote

__all__ = [
    "Breaker",
    "ObjectStore",
    "RefusedError",
    "RemoteSettings",
    "RemoteTier",
    "check_remote",
    "no_panic",
    "object_store",
    "open_remote",
    "shown_remote",
    "split_remote",
]
