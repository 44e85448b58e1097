# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Batches of LMCache's objects on a session, by namespace and with misses between the hits.

LMCache requests the objects of all ranks and layer groups at once; each rank and group is a
namespace here. The pool returns leading hits; ``_Row`` finds the hits after a miss.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from beluga.connectors.fetch import fetch
from beluga.errors import CacheError, LayoutError, PinLimitError, QuotaError
from beluga.index import BlockState, Grant, IndexClient
from beluga.kvcache import Namespace, hash_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.connectors.connection import Attachment
    from beluga.connectors.hints import RequestHint
    from beluga.kvcache import KVCache

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
    found: list[Hit | None] = [None] * len(items)
    try:
        _find(attachment, index, items, found, pin=pin)
    except (CacheError, QuotaError):  # the session continues, and so do its pins
        if pin:
            index.release([hit.grant for hit in found if hit is not None and hit.pinned])
        raise
    return found


def _find(
    attachment: Attachment,
    index: IndexClient,
    items: Sequence[Item],
    found: list[Hit | None],
    *,
    pin: bool,
) -> None:
    for namespace, start, digests in _spans(items):
        cache = attachment.cache(namespace)
        row = _Row(attachment, index, cache, cache.keys(digests), pin=pin)
        try:
            row.find()
        finally:
            found[start : start + len(row.found)] = row.found


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
        self.found: list[Hit | None] = [None] * len(keys)
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
            place = first
            while place < end:
                place += self._leading(place, end)[0] + 1
        if state.is_coming:
            for place in behind + np.flatnonzero(~there)[:UNSEEN_MAX]:
                self._leading(place, place + 1)

    def _leading(self, first: int, end: int) -> tuple[int, BlockState]:
        """Find the leading keys of [first, end). Returns their number, and the state of the next
        key at the first lookup.
        """
        keys = self._keys[first:end]
        hits, state = _lookup(self._index, keys, pin=self._pin)
        self.found[first : first + len(hits)] = hits
        rest = keys[len(hits) :]
        if state.is_coming and self._cache.onboard(rest, wait_s=self._attachment.onboard_s):
            hits += _lookup(self._index, rest, pin=self._pin)[0]
            self.found[first : first + len(hits)] = hits
        return len(hits), state


def _runs(places: NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """Yield the runs of ascending places without a gap, as [first, end)."""
    for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
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
        found = index.lookup(keys, pin=pin)
    except (PinLimitError, QuotaError):
        if not pin:
            raise
        pin, found = False, index.lookup(keys)
    return [Hit(grant, pin) for grant in found.hits], found.state
