# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Small records in the pool, with which several processes agree. The first one written counts.

A record is a block; its key is one row of :func:`beluga.kvcache.hash_keys`. A missed get does not
prove its absence: another process may be writing it, or a lower tier may have it, even one that
cannot be read at the moment. A record counts as absent only if the server's index has no trace of
it: a second one of its name would be dropped for the first one later.

Blocks depend on records: without the record their names are not known. So a session pins each
record that it has read until it ends, and no record is evicted before the blocks of its users.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeAlias

from beluga.connectors.fetch import fetch
from beluga.errors import CacheError, PinLimitError, QuotaError
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
    index, keys = IndexClient(cache.client), cache.keys(key)
    hits = fetch(cache, key, [record]).hits
    # The engine's own limit (``onboard_ms``) is for blocks, which it could compute instead.
    if not hits and sure and cache.onboard(key, wait_s=cache.client.timeout_s):
        hits = fetch(cache, key, [record]).hits
    if hits:
        _retain(attachment, index, keys, bytes(record))
        return bytes(record)
    if not sure or (index.lookup(keys).state == BlockState.MISS and not index.tiers(keys).any()):
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
    cache = attachment.cache(namespace)
    _, pins = attachment.record_pins.pop(cache.keys(key).tobytes(), (b"", None))
    if pins is not None:
        cache.release(pins)
    cache.remove(key)


def _retain(
    attachment: Attachment, index: IndexClient, keys: NDArray[np.uint64], content: bytes
) -> None:
    """Pin a record until the session ends, once. A session without a pin left does not."""
    former, pins = attachment.record_pins.get(keys.tobytes(), (b"", None))
    if former == content:
        return
    if pins is not None:  # of a record that another process has removed
        index.unpin(pins)
    with contextlib.suppress(PinLimitError, QuotaError):
        attachment.record_pins[keys.tobytes()] = content, index.pin(keys)
