# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache's storage plugins over the pool: one for its server (MP mode), one inside an engine.

``objects``  batches of named blocks on a session, which may have misses between hits ``worker``   a
thread with its own connection, for non-blocking calls ``l2``       the L2 adapter of ``lmcache
server`` ``plugin``   the storage plugin of LMCache inside an engine

LMCache is not imported before one of the two classes is accessed.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "BelugaL2Adapter":
        from beluga.connectors.lmcache.l2 import BelugaL2Adapter

        return BelugaL2Adapter
    if name == "BelugaBackend":
        from beluga.connectors.lmcache.plugin import BelugaBackend

        return BelugaBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
