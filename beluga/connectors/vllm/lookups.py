# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Lookups: how many leading blocks of a request the pool has for all ranks, in one call."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga.connectors.identity import with_weights
from beluga.connectors.vllm.adapters import NONE, Adapter, Adapters
from beluga.connectors.vllm.identity import of_part
from beluga.connectors.vllm.media import private_from
from beluga.connectors.vllm.parts import distinct, heads_name
from beluga.connectors.vllm.updates import WeightsGeneration
from beluga.errors import ConnectorError
from beluga.index import BlockState, IndexClient
from beluga.kvcache import fold
from beluga.tiers import AlwaysFetch, BreakEven, MeasuredBandwidth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from beluga.connectors.connection import Attachment, Connection
    from beluga.connectors.vllm.counters import ConnectorCounters
    from beluga.connectors.vllm.settings import VllmSettings
    from beluga.connectors.vllm.steps import BlockRange
    from beluga.index import Pins
    from beluga.kvcache import Namespace
    from beluga.tiers import FetchRule

_ASSUMED_BLOCKS_PER_S = 1e9  # so that the first blocks are fetched, and measured


class Worth:
    """Decides whether fetching blocks from lower tiers is faster than computing them, based on
    earlier fetches. ``block_tokens`` is the size of a block in tokens.
    """

    def __init__(self, settings: VllmSettings, block_tokens: int) -> None:
        b_ms, c_ms = settings.prefill_b_ms, settings.prefill_c_ms
        self._prefill = BreakEven(b_ms, c_ms)
        self._rule: FetchRule = self._prefill if b_ms or c_ms else AlwaysFetch()
        self._tokens = block_tokens
        self._speed = MeasuredBandwidth(_ASSUMED_BLOCKS_PER_S)  # in blocks

    def pays(self, cached: int, new: int) -> bool:
        """Return whether to fetch ``new`` blocks after ``cached`` ones."""
        tokens = self._tokens
        return self._rule.pays(cached * tokens, new * tokens, new, self._speed.bytes_per_s)

    def compute_s(self, cached: int, new: int) -> float:
        """Return how long computing ``new`` blocks after ``cached`` ones takes; 0 if the settings
        do not include it.
        """
        tokens = self._tokens
        return self._prefill.compute_s(cached * tokens, new * tokens)

    def took(self, count: int, seconds: float) -> None:
        """Record that a fetch of ``count`` blocks took this long."""
        self._speed.note(count, seconds)


class LookupWait:
    """The wait of one request: it starts with the first lookup that stops at a block in a lower
    tier, and ends when the blocks have arrived, or after ``limit_s`` seconds.
    """

    def __init__(self, lookups: Lookups, limit_s: float, worth: Worth) -> None:
        self._lookups, self._limit_s, self._worth = lookups, limit_s, worth
        self._since_s: float | None = None
        self._count = 0  # blocks being fetched

    def waits(self, pins: Pins | None, cached: int, missing: Callable[[], list[bytes]]) -> bool:
        """Return whether the request should wait.

        ``pins`` are those of a lookup just now, ``cached`` is the number of blocks before the ones
        that it did not find, and ``rest`` returns the digests of these.
        """
        if pins is None or self._limit_s == 0:
            return False
        now_s = time.monotonic()
        if not pins.state.is_coming:
            if self._count and self._since_s is not None:
                self._worth.took(self._count, now_s - self._since_s)
            return False
        if self._since_s is None:
            self._since_s = now_s
        elif pins.state == BlockState.PENDING:
            return now_s < self._since_s + self._limit_s
        if now_s >= self._since_s + self._limit_s:
            return False
        return self._starts_fetch(cached, missing())

    def _starts_fetch(self, cached: int, missing: list[bytes]) -> bool:
        if not self._worth.pays(cached, len(missing)):
            return False
        self._count = self._lookups.onboard(missing)
        return self._count > 0


_POOL = 1  # the bit of the pool among the tiers


@dataclasses.dataclass(frozen=True, slots=True)
class Elsewhere:
    """Blocks that engines with another number of ranks have stored: how many heads each of their
    parts has, how many parts a block has, and how many leading blocks are pinned.
    """

    split: int
    part_count: int
    blocks: int
    pins: Pins


class Lookups:
    """Looks up blocks. The ranks' namespaces come with their handshake, and the identity of the
    weights once it is known; before both, every lookup misses and nothing may be saved.
    """

    def __init__(
        self,
        connection: Connection,
        counters: ConnectorCounters,
        *,
        block_size: int = 1,
        logger: logging.Logger | None = None,
        identified: bool = False,
    ) -> None:
        """``block_size`` counts tokens; with media it must be the engine's. ``identified``: the
        setting ``identity`` names the weights.
        """
        logger = logger or logging.getLogger(__name__)
        self.ranks: tuple[Namespace, ...] = ()  # of the parts of a block, once each
        self.weights = ""
        # separates the blocks of updated weights
        self.generation = WeightsGeneration(logger, identified=identified)
        self.adapters = Adapters(logger)
        self.block_bytes = 0  # of a rank's part of a block, the largest
        self._workers = 0
        self._heads, self._splits = 0, tuple[int, ...]()
        self._others: dict[int, tuple[Namespace, ...]] = {}  # parts of other engines, by split
        self._bases: tuple[Namespace, ...] = ()  # the ranks', without the weights
        self._meeting = threading.Lock()
        self._connection = connection
        self._counters = counters
        self._block_size = block_size
        self._using: dict[str, Adapter] = {}  # by request
        self._own = os.urandom(32)  # separates blocks that no other process may find

    @property
    def met(self) -> bool:
        """Whether the ranks' namespaces are known, possibly without the weights."""
        return bool(self._bases)

    @property
    def ready(self) -> bool:
        """Whether the names of blocks are known, so that blocks may be saved."""
        return bool(self.ranks) and self.generation.known

    @property
    def space(self) -> int:
        """The space of the names of this engine's blocks, for routers; 0 before it is known."""
        if not self.ranks:
            return 0
        first = self.ranks[0].digest
        if self.generation.name:
            first = hashlib.blake2b(first, key=self.generation.name, digest_size=16).digest()
        return int.from_bytes(first[:8], "little")

    @property
    def worker_count(self) -> int:
        """The number of ranks that load and save."""
        return max(self._workers, len(self.ranks))

    def meet(
        self,
        ranks: Sequence[Namespace],
        *,
        block_bytes: int = 0,
        heads: int = 0,
        splits: Sequence[int] = (),
    ) -> None:
        """Take the namespaces of all ranks, in their order and without the weights. The largest
        part of a block has ``block_bytes``. All ranks can read parts with the numbers of heads in
        ``splits``, of the model's ``heads``; without heads no other engine's blocks are found.
        """
        with self._meeting:
            self._heads, self._splits = heads, tuple(splits) if heads else ()
            self._workers, self.block_bytes = len(ranks), block_bytes
            self._bases = distinct(ranks)
            self._join()

    def identified(self, weights: str) -> None:
        """Set the identity of the weights. Thread-safe."""
        with self._meeting:
            self.weights = weights
            self._join()

    def _join(self) -> None:
        if self._bases and self.weights:
            ranks = tuple(with_weights(base, self.weights) for base in self._bases)
            self._others = {
                split: tuple(
                    of_part(ranks[0], heads_name(first, split, self._heads))
                    for first in range(0, self._heads, split)
                )
                for split in self._splits
            }
            self.ranks = ranks

    def reset(self) -> None:
        """Separate this engine's blocks from now on, because its weights may have changed."""
        self.generation.reset()

    def begin(self, request: Any) -> bool | None:
        """Determine what a request computes with. Returns whether its blocks may be shared, or None
        while its adapter's bytes are being hashed.
        """
        try:
            adapter = self.adapters.of(request.lora_request)
        except ConnectorError as error:
            self.adapters.warn(error)
            return False
        if adapter is None:
            return None
        if adapter is not NONE:
            self._using[request.request_id] = adapter
        return True

    def unchanged(self, request: Any) -> bool:
        """Return whether a request still computes with the same adapter."""
        return self._using.get(request.request_id, NONE).unchanged

    def end(self, request: Any) -> None:
        """Drop a request."""
        self._using.pop(request.request_id, None)

    def private_from(self, request: Any) -> int | None:
        """Return the first block of a request that no other process may find, or None."""
        return private_from(request, self._block_size)

    def digests(self, request: Any, first: int, last: int) -> list[bytes]:
        """Return the digests of blocks [first, last) of a request, from vLLM's hashes, the adapter,
        the generation, and, from the first media with a name that a client chose, this process.

        vLLM's hash includes an adapter's name; another engine may use the name for another adapter.
        """
        hashes: Sequence[bytes] = request.block_hashes[first:last]
        return self.digests_of(request, hashes, range(first, last), size=self._block_size)

    def digests_of(
        self,
        request: Any,
        hashes: Sequence[bytes],
        numbers: Sequence[int],
        *,
        size: int,
        group: int = 0,
    ) -> list[bytes]:
        """Return the digests of some blocks of a group of layers, from the hash of each one's
        prefix. ``numbers`` are their places, in ascending order, counted in blocks of ``size``
        tokens.
        """
        adapter = self._using.get(request.request_id, NONE)
        key, private = adapter.key, private_from(request, size)
        if request.lora_request is not None and not key:  # not started: its bytes are unknown
            private = 0
        shared = len(hashes) if private is None else bisect.bisect_left(numbers, private)
        return [
            *self.named(hashes[:shared], key, group=group),
            *self.named(hashes[shared:], key, group=group, private=True),
        ]

    def named(
        self,
        hashes: Sequence[bytes],
        adapter: bytes = b"",
        *,
        group: int = 0,
        private: bool = False,
    ) -> list[bytes]:
        """Return the digests under which the pool keeps blocks with these hashes. This process
        alone finds ``private`` blocks.
        """
        components = [adapter, self.generation.name, self._own if private else b""]
        if group:  # the hash names a prefix, and each group has a block for it
            components.append(group.to_bytes(32, "big"))
        if not any(components):
            return list(hashes)
        # each part is empty or has 32 bytes, so the marks show which are present
        marks = bytes(bool(component) for component in components)
        key = hashlib.blake2b(marks + b"".join(components), digest_size=32).digest()
        return [hashlib.blake2b(digest, key=key, digest_size=32).digest() for digest in hashes]

    def pin(self, digests: list[bytes]) -> tuple[int, Pins | None]:
        """Pin the leading blocks that every rank finds. Returns their number and the pins, or
        None.
        """
        if not digests or not self.ready:
            self._counters.add(unidentified=int(bool(digests and self._bases and not self.ranks)))
            return 0, None
        started = time.perf_counter()
        pins = self._pinned(digests, self.ranks)
        self._counters.add(
            lookups=1,
            lookup_s=time.perf_counter() - started,
            lookup_failures=int(pins is None),
        )
        return (pins.count // len(self.ranks) if pins is not None else 0), pins

    def elsewhere(self, digests: list[bytes]) -> Elsewhere | None:
        """Pin leading blocks that engines with another number of ranks have stored, if there are
        any.
        """
        others = self._others
        if not others or not digests or not self.ready:
            return None
        spaces = [space for several in others.values() for space in several]
        started = time.perf_counter()
        keys = self._keys(digests[:1], spaces)
        tiers = self._connection.attempt(
            "looking blocks up", lambda attachment: IndexClient(attachment.client).tiers(keys)
        )
        match, first = None, 0
        there = np.zeros(len(spaces), bool) if tiers is None else (tiers & _POOL).astype(bool)
        for split, several in others.items():
            if there[first : first + len(several)].all():
                pins = self._pinned(digests, several)
                count = pins.count // len(several) if pins is not None else 0
                if pins is not None and count > 0:
                    match = Elsewhere(split, len(several), count, pins)
                    break
                self.release(pins)
            first += len(several)
        self._counters.add(lookup_s=time.perf_counter() - started)
        return match

    def _pinned(self, digests: list[bytes], spaces: Sequence[Namespace]) -> Pins | None:
        keys = self._keys(digests, spaces)
        return self._connection.attempt(
            "looking blocks up", lambda attachment: attachment.cache(spaces[0]).pin(keys)
        )

    def tiers(self, digests: list[bytes]) -> NDArray[np.uint8] | None:
        """Return in which tiers every rank finds each block, as bits: 1 is the pool. None means
        that there was no answer.
        """
        if not self.ready:
            self._counters.add(unidentified=int(bool(self._bases and not self.ranks)))
            return None
        started = time.perf_counter()
        keys = self._keys(digests)
        tiers = self._connection.attempt(
            "looking blocks up", lambda attachment: IndexClient(attachment.client).tiers(keys)
        )
        self._counters.add(
            lookups=1,
            lookup_s=time.perf_counter() - started,
            lookup_failures=int(tiers is None),
        )
        if tiers is None:
            return None
        together: NDArray[np.uint8] = np.bitwise_and.reduce(
            tiers.reshape(len(digests), len(self.ranks)), axis=1
        )
        return together

    def prefetch(self, digests: list[bytes]) -> None:
        """Start to fetch leading blocks from lower tiers, with low priority."""
        if not digests or not self.ready:
            return
        keys = self._keys(digests)
        self._connection.attempt(
            "requesting blocks from lower tiers", lambda a: a.cache(self.ranks[0]).prefetch(keys)
        )

    def onboard(self, digests: list[bytes]) -> int:
        """Start to fetch leading blocks from lower tiers. Returns how many are in the pool or will
        arrive.
        """
        keys = self._keys(digests)

        def request(attachment: Attachment) -> int:
            return attachment.cache(self.ranks[0]).onboard(keys)

        count = self._connection.attempt("requesting blocks from lower tiers", request) or 0
        return -(-count // len(self.ranks))

    def saved(self, tokens: int, seconds: float) -> None:
        """Let the server count tokens that the engine loads, and the time that computing them would
        have taken. The next call to the server sends the count.
        """

        def note(attachment: Attachment) -> None:
            attachment.client.report.saved(tokens, seconds)

        self._connection.attempt("counting", note)

    def locate(self, ranges: Sequence[BlockRange], pins: Pins | None, part_count: int = 0) -> None:
        """Record the places of the blocks to load, so that no rank looks them up again. They are
        the leading ones of the pins, with that many parts each, or those of this engine.
        """
        if pins is None:
            return
        records, part_count = pins.records(), part_count or len(self.ranks)
        wanted = sum(len(span.block_ids) for span in ranges) * part_count
        if not 0 < wanted <= len(records):
            return
        first = 0
        for span in ranges:
            last = first + len(span.block_ids) * part_count
            span.records = records[first:last].tobytes()
            first = last

    def release(self, pins: Pins | None) -> None:
        """Release the pins of :meth:`pin`."""
        if pins is not None and pins.count > 0:
            self._connection.attempt(
                "releasing blocks", lambda a: a.cache(self.ranks[0]).release(pins)
            )

    def _keys(self, digests: list[bytes], spaces: Sequence[Namespace] = ()) -> NDArray[np.uint64]:
        packed = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(digests), -1)
        # The keys of all parts of a block are adjacent, so leading hits are whole blocks.
        spaces = spaces or self.ranks
        return np.stack([fold(space, packed) for space in spaces], axis=1).reshape(-1, 2)
