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
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from beluga.errors import CacheError, PinLimitError, QuotaError
from beluga.index import BlockState, IndexClient
from beluga.kvcache import Namespace, hash_keys

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from beluga.connectors.connection import Attachment
    from beluga.kvcache import GetResult, KVCache, Run

    Key: TypeAlias = NDArray[np.uint8]


def fetch(
    cache: KVCache,
    keys: NDArray[np.uint8] | NDArray[np.uint64],
    targets: Sequence[Any] | Run,
    *,
    records: NDArray[np.void] | None = None,
) -> GetResult:
    """Fetch the leading blocks that the pool has undamaged. ``records`` are the locations of blocks
    that another session has pinned. Raises the errors of the cache.

    A damaged block is removed. It would otherwise be found, miss, and count as present when the
    engine stores it again, forever.
    """
    result = cache.get(keys, targets, records=records)
    if result.mismatches and result.hits < len(keys):
        cache.remove(keys[result.hits : result.hits + 1])
    return result


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
    stored = read(attachment, namespace, key, len(content))
    if stored is None:
        raise CacheError(
            "the pool has no space for a record of the connectors; unpin blocks or enlarge the pool"
        )
    return stored


def remove(attachment: Attachment, namespace: Namespace, key: Key) -> None:
    """Remove the record from the pool and all tiers."""
    cache = attachment.cache(namespace)
    with attachment.record_lock:
        _, pins = attachment.record_pins.pop(cache.keys(key).tobytes(), (b"", None))
    if pins is not None:
        cache.release(pins)
    cache.remove(key)


def _retain(
    attachment: Attachment, index: IndexClient, keys: NDArray[np.uint64], content: bytes
) -> None:
    """Pin a record until the session ends, once. A session without a pin left does not."""
    with attachment.record_lock:
        former, pins = attachment.record_pins.get(keys.tobytes(), (b"", None))
        if former == content:
            return
        if pins is not None:  # of a record that another process has removed
            index.unpin(pins)
        with contextlib.suppress(PinLimitError, QuotaError):
            attachment.record_pins[keys.tobytes()] = content, index.pin(keys)


SIZE = 16
_RECORD = hash_keys(["era"])
_ATTEMPTS = 4  # each but the first follows a generation that another process has ended meanwhile


class CacheGeneration:
    """The generation of all users of one ``namespace``: it clears a cache that several processes
    share, at once and whatever its content. Thread-safe.

    The names of all blocks start with the generation, which is a random number in a record. Every
    process reads it before each call, and pins it until its session ends, so that no pinned block
    becomes unreachable. Removing the record ends the generation, and the next call starts a new
    one. A put that started before the end uses the old generation in its names, so its blocks are
    never found. An eviction of the record while no session has it ends the generation, too:
    existing blocks then miss, but no block is found that should not be.

    An ended generation must not return, although a lower tier may still have the record: the tier
    may have been down, or refuse deletes. So a second record marks the generation as ended. It has
    its own name, is never removed, and is offloaded to the same tiers. It is looked up whenever a
    generation is read for the first time.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = Namespace({"era of": namespace.digest})
        self._lock = threading.Lock()
        self._clears = self._cleared = 0  # clears requested and done; the pool may be unavailable
        self._began: bytes | None = None  # a generation that had not ended when it was first read

    @property
    def pending(self) -> bool:
        """Whether a requested clear is not done yet."""
        return self._clears != self._cleared

    def clear(self) -> None:
        """End the generation, at the latest at the next :meth:`now`."""
        with self._lock:
            self._clears += 1

    def now(self, attachment: Attachment) -> bytes:
        """Return the current generation. Raises the errors of a cache, and CacheError while another
        process starts a generation or the current generation is uncertain.
        """
        if self.pending:
            with self._lock:  # only one thread ends it, once
                self._end(attachment)
        generation = read(attachment, self._namespace, _RECORD, SIZE) or self._begin(attachment)
        for _ in range(_ATTEMPTS):
            if generation == self._began:
                return generation
            if read(attachment, self._namespace, _end_of(generation), SIZE) is None:
                self._began = generation
                return generation
            # A lower tier returned the record of an ended generation. Write the new one at once,
            # because the tier may keep the old one forever.
            remove(attachment, self._namespace, _RECORD)
            generation = self._begin(attachment)
        raise CacheError("eras of this cache end faster than they start; clear it less often")

    def _begin(self, attachment: Attachment) -> bytes:
        return write(attachment, self._namespace, _RECORD, os.urandom(SIZE))

    def _end(self, attachment: Attachment) -> None:
        clears = self._clears
        if clears == self._cleared:
            return
        generation = read(attachment, self._namespace, _RECORD, SIZE)
        if generation is not None:
            with contextlib.suppress(CacheError):  # a full pool still removes
                write(attachment, self._namespace, _end_of(generation), generation)
            remove(attachment, self._namespace, _RECORD)
        self._began = None
        self._cleared = clears


def _end_of(generation: bytes) -> NDArray[np.uint8]:
    return hash_keys([b"end of " + generation])
