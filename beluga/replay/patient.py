# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A client's calls to the pool: counted, timed, and repeated where a replay has to wait."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from beluga._ffi import lib
from beluga.errors import RpcError
from beluga.index import BlockState
from beluga.kvcache import GetResult, KVCache, PutResult, Run

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
            call = partial(self._cache.get, digests[count:], _rest(targets, count))
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


def _rest(blocks: Any, first: int) -> Any:
    if isinstance(blocks, Run):
        return dataclasses.replace(blocks.rest(first), start=0)
    return blocks[first:]
