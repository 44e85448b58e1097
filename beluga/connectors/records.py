# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Small records in the pool, with which several processes agree. The first one written counts.

A record is a block; its key is one row of :func:`beluga.kvcache.hash_keys`. A missed get does not
prove its absence: another process may be writing it, or a lower tier may have it, even one that
cannot be read at the moment. A record counts as absent only if the server's index has no trace of
it: a second one of its name would be dropped for the first one later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from beluga.connectors.fetch import fetch
from beluga.errors import CacheError
from beluga.index import BlockState, IndexClient

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

    Waits for lower tiers, at most the session's timeout without progress. Raises CacheError while
    its absence is uncertain, and the errors of a cache. Without ``sure``, it then returns None
    instead, and waits no longer than for a block.
    """
    cache, record = attachment.cache(namespace), bytearray(size)
    if fetch(cache, key, [record]).hits:
        return bytes(record)
    if not sure:
        return None
    # The engine's own limit (``onboard_ms``) is for blocks, which it could compute instead.
    if cache.onboard(key, wait_s=cache.client.timeout_s) and fetch(cache, key, [record]).hits:
        return bytes(record)
    index, keys = IndexClient(cache.client), cache.keys(key)
    if index.lookup(keys).state == BlockState.MISS and not index.tiers(keys).any():
        return None
    raise CacheError(
        "a record of the connectors is being written, or a lower tier has not replied; the call "
        "is a miss, and the next one checks again"
    )


def write(attachment: Attachment, namespace: Namespace, key: Key, content: bytes) -> bytes:
    """Write the record unless it exists. Returns the bytes that count, which another process may
    have written.

    Raises CacheError if there is none afterwards (the pool has no space), and the errors of
    :func:`read`.
    """
    attachment.cache(namespace).put(key, [content])
    found = read(attachment, namespace, key, len(content))
    if found is None:
        raise CacheError(
            "the pool has no space for a record of the connectors; unpin blocks or enlarge the pool"
        )
    return found


def remove(attachment: Attachment, namespace: Namespace, key: Key) -> None:
    """Remove the record from the pool and all tiers."""
    attachment.cache(namespace).remove(key)
