# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Small records in the pool, by which several processes agree. The first that is written counts.

A record is a block; its key is one row of :func:`beluga.kvcache.hash_keys`. It is not enough that a
get misses it: another process may be writing it, or a tier below the pool may have it. A record
counts as absent only when the server's index has nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from beluga.connectors.fetch import fetch
from beluga.errors import CacheError
from beluga.index import BlockState, MetaClient

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from beluga.connectors.connection import Attachment
    from beluga.kvcache import Namespace

    Key: TypeAlias = NDArray[np.uint8]


def read(
    attachment: Attachment, namespace: Namespace, key: Key, size: int, *, sure: bool = True
) -> bytes | None:
    """Return the record's ``size`` bytes, or None if it does not exist.

    Waits for tiers below the pool, at most the session's time limit without progress. Raises
    CacheError while it is not certain that there is none, and what a cache raises. Without
    ``sure`` it returns None instead, and waits no longer than for a block.
    """
    cache, record = attachment.cache(namespace), bytearray(size)
    if fetch(cache, key, [record]).hits:
        return bytes(record)
    if not sure:
        return None
    # The engine's own limit (``onboard_ms``) is for blocks, which may be computed instead.
    if cache.onboard(key, wait_s=cache.client.timeout_s) and fetch(cache, key, [record]).hits:
        return bytes(record)
    if MetaClient(cache.client).lookup(cache.keys(key)).state == BlockState.MISS:
        return None
    raise CacheError(
        "a record of the connectors is being written, or a tier below the pool has not answered; "
        "the call is a miss, and the next one looks again"
    )


def write(attachment: Attachment, namespace: Namespace, key: Key, content: bytes) -> bytes:
    """Write the record unless it exists. Returns the bytes that count, which may be another's.

    Raises CacheError if there is none afterwards (the pool has no space), and what :func:`read`
    raises.
    """
    attachment.cache(namespace).put(key, [content])
    found = read(attachment, namespace, key, len(content))
    if found is None:
        raise CacheError(
            "the pool has no space for a record of the connectors; unpin blocks or enlarge the pool"
        )
    return found


def remove(attachment: Attachment, namespace: Namespace, key: Key) -> None:
    """Remove the record wherever it is."""
    attachment.cache(namespace).remove(key)
