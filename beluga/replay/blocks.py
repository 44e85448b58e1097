# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The blocks of a replay: their contents, and a cache that counts what it moves.

Every word of a block is computed from the block's id and the word's index. So a reader can check
each byte without a copy, and detects another block's bytes, bytes in the wrong place, and bytes
that were never written. It costs one multiplication per word, which is cheap compared with the
copy.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from beluga._ffi import lib
from beluga.errors import RpcError
from beluga.index import BlockState
from beluga.kvcache import GetResult, KVCache, PutResult, Run

Ids: TypeAlias = npt.NDArray[np.uint64]
Words: TypeAlias = npt.NDArray[np.uint64]
Digests: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class EngineTally:
    """What engines' block managers counted, in blocks. ``missed_targets`` is text for display."""

    device_hits: int = 0
    onboarded: int = 0
    prefetched: int = 0
    offloaded: int = 0
    evicted: int = 0
    missed_targets: tuple[str, ...] = ()


class Contents:
    """Keys and bytes of blocks of one size. ``block_size`` is in bytes, a multiple of 8."""

    def __init__(self, block_size: int) -> None:
        word_count = block_size // 8
        self._odds: Words = np.arange(1, 2 * word_count, 2, dtype=np.uint64)
        self._scratch = np.empty((0, word_count), np.uint64)

    def fill(self, ids: Ids, blocks: Words) -> None:
        """Write the blocks of ``ids`` into ``blocks``, one row for each."""
        np.multiply.outer(_mixed(ids), self._odds, out=blocks)

    def wrong_count(self, ids: Ids, blocks: Words) -> int:
        """Return how many rows of ``blocks`` differ from what :meth:`fill` would write for
        ``ids``.
        """
        if len(self._scratch) < len(ids):
            self._scratch = np.empty(blocks.shape, np.uint64)
        expected = self._scratch[: len(ids)]
        self.fill(ids, expected)
        return int((blocks != expected).any(axis=1).sum())


def digests(ids: Ids) -> Digests:
    """Return 16 bytes per id that look random, like an engine's digest of a block."""
    words = np.stack([_mixed(ids), _mixed(ids ^ np.uint64(1 << 63))], axis=1)
    return words.view(np.uint8)


def _mixed(ids: Ids) -> Words:
    """Apply a bijection of 64 bits that leaves no pattern (the finalizer of splitmix64)."""
    z = ids + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = z ^ (z >> np.uint64(31))
    return mixed


T = TypeVar("T")

PATIENCE_S = 60.0
"""How long a patient client waits for a server or for tiers."""

_PENDING_WAIT_S = 0.1  # the longest wait for a block that another client is writing
_PENDING_NAP_S = 0.0002
# A tier has a backlog, or the server ended between a grant and its commit.
_TRY_AGAIN = -int(lib.BL_ERROR_OFFLOADING), -int(lib.BL_ERROR_NO_GRANT)
_OFFLOADING_NAP_S = 0.001


@dataclass(slots=True)
class Tally:
    """The counts of one client. ``got_count`` has the blocks that came from the pool; an engine has
    hits besides, in its own memory.
    """

    request_count: int = 0
    looked_up_count: int = 0
    hit_count: int = 0
    got_count: int = 0
    put_count: int = 0
    refused_count: int = 0
    wrong_count: int = 0
    mismatch_count: int = 0
    get_s: float = 0.0
    put_s: float = 0.0
    rpc_ns: list[int] = field(default_factory=list)


class PatientCache:
    """A cache that counts what it does. A ``patient`` one repeats calls while a server is restarted
    and while tiers have a backlog. One thread gets, and one thread puts.
    """

    def __init__(self, cache: KVCache, tally: Tally, *, patient: bool) -> None:
        self._cache, self._tally, self._patient = cache, tally, patient

    def get(self, digests: Any, targets: Any) -> GetResult:
        """Get the leading blocks, and wait a little for those that another client writes."""
        deadline = None
        count = mismatches = 0
        while True:
            start = time.perf_counter()
            call = partial(self._cache.get, digests[count:], _blocks_from(targets, count))
            result = self.retrying(call)
            now = time.perf_counter()
            self._tally.get_s += now - start
            mismatches += result.mismatches
            count += result.hits
            if count == len(digests) or result.states[result.hits] != BlockState.PENDING:
                break
            deadline = deadline or now + _PENDING_WAIT_S
            if now > deadline:
                break
            time.sleep(_PENDING_NAP_S)
        self._tally.mismatch_count += mismatches
        self._tally.got_count += count
        return GetResult(count, result.states, mismatches)

    def put(self, digests: Any, sources: Any) -> PutResult:
        """Put blocks, with retries if tiers have a backlog. A block that any of the calls stored is
        stored.
        """
        until = time.monotonic() + PATIENCE_S
        states: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        while True:
            start = time.perf_counter()
            result = self.retrying(partial(self._cache.put, digests, sources))
            self._tally.put_s += time.perf_counter() - start
            self._tally.put_count += result.stored
            stored = result.states if states is None else states
            states = np.where(stored == BlockState.GRANTED, stored, result.states)
            waits = self._patient and np.isin(result.statuses, _TRY_AGAIN).any()
            if not waits or time.monotonic() > until:
                self._tally.refused_count += result.refused
                return PutResult(states, result.statuses)
            time.sleep(_OFFLOADING_NAP_S)

    def retrying(self, call: Callable[[], T]) -> T:
        """Call, again if the server ended meanwhile and another is being started."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return call()
            except RpcError:
                if not self._patient or time.monotonic() > until:
                    raise
                time.sleep(_PENDING_WAIT_S)


def _blocks_from(blocks: Any, first: int) -> Any:
    if isinstance(blocks, Run):
        return dataclasses.replace(blocks.rest(first), start=0)
    return blocks[first:]
