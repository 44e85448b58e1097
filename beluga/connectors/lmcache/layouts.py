# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The layouts in which the pool has a model's objects, for all processes that use the pool.

LMCache's key of an object has no layout: it deletes, and may look up, an object without one. But
the same key with another layout is another object, which must never be loaded instead. So each
layout has a random id in the pool, which is part of the objects' names, and a lookup with only the
key tries the names of all ids.

The ids are a chain of records: the name of each is derived from the id before it. A record is
written once. If one is lost, it and its successors are unreachable: the objects under their ids
miss permanently.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from beluga.connectors import records
from beluga.kvcache import hash_keys

if TYPE_CHECKING:
    from beluga.connectors.connection import Attachment
    from beluga.kvcache import Namespace

Layout: TypeAlias = tuple[tuple[tuple[int, ...], str], ...]
"""A shape and a dtype for each tensor of an object."""

LAYOUTS_MAX = 64  # per model; objects with further layouts are not stored

_ID_SIZE = _DIGEST_SIZE = 16
_SIZE = _ID_SIZE + _DIGEST_SIZE
_FIRST = hash_keys(["layouts"])


def layout_of(shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> Layout:
    """Convert LMCache's lists of shapes and dtypes to a layout."""
    pairs = zip(shapes, dtypes, strict=True)
    return tuple((tuple(int(size) for size in shape), str(dtype)) for shape, dtype in pairs)


def layout_of_object(memory: Any) -> Layout:
    """Return the layout of a MemoryObj."""
    try:
        return layout_of(memory.get_shapes(), memory.get_dtypes())
    except AssertionError:  # the layout has a single shape instead of a list
        return layout_of([memory.get_shape()], [memory.get_dtype()])


def digest_of(layout: Layout) -> bytes:
    """Return the name of a layout in the records."""
    text = repr(layout).encode()
    return hashlib.blake2b(text, digest_size=_DIGEST_SIZE, person=b"beluga-layout").digest()


class Layouts:
    """The ids of one model's layouts. There is no state between calls, because any process may add
    a layout, and any record may be evicted.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    def ids(self, attachment: Attachment) -> list[bytes]:
        """Return the ids of all layouts. Raises the errors of
        :func:`beluga.connectors.records.read`.
        """
        return list(self._walk(attachment, None, add=False).values())

    def ids_of(
        self, attachment: Attachment, layouts: Collection[Layout], *, add: bool = False
    ) -> dict[Layout, bytes]:
        """Return the ids of ``layouts``, without those that have none; with ``add`` these get one,
        up to LAYOUTS_MAX. Raises the errors of :func:`beluga.connectors.records.write`.
        """
        by_digest = {digest_of(layout): layout for layout in layouts}
        found = self._walk(attachment, set(by_digest), add=add)
        return {by_digest[digest]: one for digest, one in found.items() if digest in by_digest}

    def forget(self, attachment: Attachment) -> None:
        """Remove the first record, so that all objects of the model are misses."""
        records.remove(attachment, self._namespace, _FIRST)

    def _walk(
        self, attachment: Attachment, wanted: set[bytes] | None, *, add: bool
    ) -> dict[bytes, bytes]:
        """Follow the chain until all ``wanted`` digests are found, or to its end if None. Returns
        ids by digest.
        """
        found: dict[bytes, bytes] = {}
        sure = add or wanted is None  # otherwise uncertain objects miss
        key = _FIRST
        while len(found) < LAYOUTS_MAX and (wanted is None or wanted - found.keys()):
            record = records.read(attachment, self._namespace, key, _SIZE, sure=sure)
            if record is None:
                if not add or wanted is None:
                    break
                new = os.urandom(_ID_SIZE) + min(wanted - found.keys())
                record = records.write(attachment, self._namespace, key, new)
            one, digest = record[:_ID_SIZE], record[_ID_SIZE:]
            found.setdefault(digest, one)
            key = hash_keys([b"after " + one])
        return found
