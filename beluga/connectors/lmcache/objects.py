# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Batches of LMCache's objects on a session, by namespace and with misses between the hits.

LMCache requests the objects of all ranks and layer groups at once; each rank and group is a
namespace here. The pool returns leading hits; ``_Row`` finds the hits after a miss.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from beluga.connectors import records
from beluga.connectors.records import fetch
from beluga.errors import CacheError, LayoutError, PinLimitError, QuotaError
from beluga.index import BlockState, Grant, IndexClient
from beluga.kvcache import Namespace, hash_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.connectors.connection import Attachment
    from beluga.connectors.hints import RequestHint
    from beluga.kvcache import KVCache

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
    """The ids of one model's layouts in the pool, for all processes that use it. There is no state
    between calls, because any process may add a layout.

    LMCache's key of an object has no layout: it deletes, and may look up, an object without one.
    But the same key with another layout is another object, which must never be loaded instead. So
    each layout has a random id in the pool, which is part of the objects' names, and a lookup with
    only the key tries the names of all ids.

    The ids are a chain of records: the name of each is derived from the id before it. A record is
    written once. If one is lost, it and its successors are unreachable: the objects under their ids
    miss permanently.
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
        ids = self._walk(attachment, set(by_digest), add=add)
        return {
            by_digest[digest]: layout_id for digest, layout_id in ids.items() if digest in by_digest
        }

    def forget(self, attachment: Attachment) -> None:
        """Remove the first record, so that all objects of the model are misses."""
        records.remove(attachment, self._namespace, _FIRST)

    def _walk(
        self, attachment: Attachment, wanted: set[bytes] | None, *, add: bool
    ) -> dict[bytes, bytes]:
        """Follow the chain until all ``wanted`` digests are found, or to its end if None. Returns
        ids by digest.
        """
        ids: dict[bytes, bytes] = {}
        sure = add or wanted is None  # otherwise uncertain objects miss
        key = _FIRST
        while len(ids) < LAYOUTS_MAX and (wanted is None or wanted - ids.keys()):
            record = records.read(attachment, self._namespace, key, _SIZE, sure=sure)
            if record is None:
                if not add or wanted is None:
                    break
                new = os.urandom(_ID_SIZE) + min(wanted - ids.keys())
                record = records.write(attachment, self._namespace, key, new)
            layout_id, digest = record[:_ID_SIZE], record[_ID_SIZE:]
            ids.setdefault(digest, layout_id)
            key = hash_keys([b"after " + layout_id])
        return ids


Item: TypeAlias = tuple[Namespace, bytes]
"""The namespace of an object, and its name there, which may be any bytes."""


class Hit(NamedTuple):
    """An object that the pool has, and whether this lookup pinned it."""

    grant: Grant
    pinned: bool


UNSEEN_MAX = 64  # keys of a row that are looked up although only a remote tier can have them


def bytes_of(memory: Any) -> memoryview:
    """Return a MemoryObj's bytes, writable. Raises LayoutError for device memory, and for an object
    without memory (a fake or meta tensor, or one that LMCache has freed).
    """
    raw = memory.raw_tensor
    if raw is None or raw.device.type != "cpu":
        raise LayoutError("an object of LMCache is not in CPU memory; pass one that is")
    try:
        view: memoryview = memory.byte_array
    except (RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(
            f"an object of LMCache has no memory ({error}); pass an allocated one"
        ) from error
    return view


def find(attachment: Attachment, items: Sequence[Item], *, pin: bool) -> list[Hit | None]:
    """Find each object; a miss is None. With ``pin``, hits are pinned if the session's quota allows
    it. Objects that only a lower tier has are onboarded first.
    """
    index = IndexClient(attachment.client)
    hits: list[Hit | None] = [None] * len(items)
    try:
        _find(attachment, index, items, hits, pin=pin)
    except (CacheError, QuotaError):  # the session continues, and so do its pins
        if pin:
            index.release([hit.grant for hit in hits if hit is not None and hit.pinned])
        raise
    return hits


def _find(
    attachment: Attachment,
    index: IndexClient,
    items: Sequence[Item],
    hits: list[Hit | None],
    *,
    pin: bool,
) -> None:
    for namespace, start, digests in _spans(items):
        cache = attachment.cache(namespace)
        row = _Row(attachment, index, cache, cache.keys(digests), pin=pin)
        try:
            row.find()
        finally:
            hits[start : start + len(row.hits)] = row.hits


class _Row:
    """The objects of one namespace in a batch.

    Most objects of a hybrid model's window or state are misses. So after the first miss, the index
    is queried for which keys the pool or a tier has, and only runs of such keys are looked up.
    """

    def __init__(
        self,
        attachment: Attachment,
        index: IndexClient,
        cache: KVCache,
        keys: NDArray[np.uint64],
        *,
        pin: bool,
    ) -> None:
        self.hits: list[Hit | None] = [None] * len(keys)
        self._attachment, self._index, self._cache = attachment, index, cache
        self._keys, self._pin = keys, pin

    def find(self) -> None:
        """Find each object."""
        count, state = self._leading(0, len(self._keys))
        behind = count + 1
        if behind >= len(self._keys):
            return
        there = self._index.tiers(self._keys[behind:]) != 0
        for first, end in _runs(behind + np.flatnonzero(there)):
            at = first
            while at < end:
                at += self._leading(at, end)[0] + 1
        if state.is_coming:
            for at in behind + np.flatnonzero(~there)[:UNSEEN_MAX]:
                self._leading(at, at + 1)

    def _leading(self, first: int, end: int) -> tuple[int, BlockState]:
        """Find the leading keys of [first, end). Returns their number, and the state of the next
        key at the first lookup.
        """
        keys = self._keys[first:end]
        hits, state = _lookup(self._index, keys, pin=self._pin)
        self.hits[first : first + len(hits)] = hits
        missing = keys[len(hits) :]
        if state.is_coming and self._cache.onboard(missing, wait_s=self._attachment.onboard_s):
            hits += _lookup(self._index, missing, pin=self._pin)[0]
            self.hits[first : first + len(hits)] = hits
        return len(hits), state


def _runs(positions: NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """Yield the runs of ascending places without a gap, as [first, end)."""
    for run in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1


def release(attachment: Attachment, grants: Sequence[Grant]) -> int:
    """Release the pins of grants. Returns how many were released."""
    return IndexClient(attachment.client).release(grants)


def load(attachment: Attachment, items: Sequence[Item], targets: Sequence[Any]) -> list[bool]:
    """Fetch each object into its target. Returns False for each object whose target is
    undefined.
    """
    done = [False] * len(items)
    for namespace, start, digests in _spans(items):
        cache, end = attachment.cache(namespace), start + len(digests)
        keys, at = cache.keys(digests), start
        while at < end:
            hits = fetch(cache, keys[at - start :], targets[at:end]).hits
            done[at : at + hits] = [True] * hits
            at += hits + 1
    return done


def store(
    attachment: Attachment, items: Sequence[Item], sources: Sequence[Any]
) -> list[BlockState]:
    """Put each object. Returns the resulting state of each."""
    states: list[BlockState] = []
    for namespace, start, digests in _spans(items):
        cache = attachment.cache(namespace)
        result = cache.put(digests, sources[start : start + len(digests)])
        states += [BlockState(state) for state in result.states]
    return states


def hint(attachment: Attachment, items: Sequence[Item], given: RequestHint) -> None:
    """Give a hint to objects in the pool."""
    for namespace, _, digests in _spans(items):
        given.give(attachment.cache(namespace), digests)


def exist(attachment: Attachment, items: Sequence[Item]) -> list[bool]:
    """Return whether the pool or a lower tier has each object. Unlike :func:`find`, this does not
    count as a use, and does not query remote tiers.
    """
    index, there = IndexClient(attachment.client), list[bool]()
    for namespace, _, digests in _spans(items):
        tiers = index.tiers(attachment.cache(namespace).keys(digests))
        there += [bool(bits) for bits in tiers]
    return there


def remove(attachment: Attachment, items: Sequence[Item]) -> int:
    """Remove objects. Returns how many there were."""
    spans = _spans(items)
    return sum(attachment.cache(namespace).remove(digests) for namespace, _, digests in spans)


def _spans(items: Sequence[Item]) -> Iterator[tuple[Namespace, int, NDArray[np.uint8]]]:
    """Yield runs of items with the same namespace: the namespace, the start, and the digests."""
    start = 0
    for _, group in itertools.groupby(items, key=lambda item: item[0].digest):
        members = list(group)
        yield members[0][0], start, hash_keys(name for _, name in members)
        start += len(members)


def _lookup(
    index: IndexClient, keys: NDArray[np.uint64], *, pin: bool
) -> tuple[list[Hit], BlockState]:
    """Return the leading hits, and the state of the next key."""
    try:
        result = index.lookup(keys, pin=pin)
    except (PinLimitError, QuotaError):
        if not pin:
            raise
        pin, result = False, index.lookup(keys)
    return [Hit(grant, pin) for grant in result.hits], result.state
