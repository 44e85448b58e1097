# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Lookups: how many leading blocks of a request the pool has for all ranks, in one call."""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga.connectors.vllm.identity import adapter_identity
from beluga.kvcache import fold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from beluga.connectors.connection import Attachment, Connection
    from beluga.connectors.vllm.counters import Counters
    from beluga.kvcache import Namespace
    from beluga.meta import Pins

ADAPTERS_MAX = 1024  # how many adapters' fingerprints are remembered


class Lookups:
    """Looks blocks up. The ranks' namespaces come with their handshake; before it, every lookup
    misses.
    """

    def __init__(self, connection: Connection, counters: Counters) -> None:
        self.ranks: tuple[Namespace, ...] = ()
        self._connection = connection
        self._counters = counters
        self._adapters: dict[tuple[str, str], bytes] = {}
        self._era = b""  # after a reset, this separates the engine's blocks from earlier ones

    def reset(self) -> None:
        """Separate this engine's blocks from now on, because its weights may have changed."""
        self._era = os.urandom(32)

    def digests(self, request: Any, first: int, last: int) -> list[bytes]:
        """Return the digests of blocks [first, last) of a request, from vLLM's hashes and the
        adapter.

        vLLM's hash includes an adapter's name; another engine may use the name for another adapter.
        """
        hashes: Sequence[bytes] = request.block_hashes[first:last]
        return self.named(hashes, self._adapter(request.lora_request))

    def named(self, hashes: Sequence[bytes], adapter: bytes = b"") -> list[bytes]:
        """Return the digests under which the pool keeps blocks with these hashes."""
        key = adapter + self._era
        if not key:
            return list(hashes)
        return [hashlib.blake2b(one, key=key, digest_size=32).digest() for one in hashes]

    def pin(self, digests: list[bytes]) -> tuple[int, Pins | None]:
        """Pin the leading blocks that every rank finds. Returns their number and the pins, or
        None.
        """
        if not digests or not self.ranks:
            return 0, None
        started = time.perf_counter()
        keys = self._keys(digests)

        def ask(attachment: Attachment) -> Pins:
            return attachment.cache(self.ranks[0]).pin(keys)

        pins = self._connection.attempt("looking blocks up", ask)
        self._counters.add(lookups=1, lookup_s=time.perf_counter() - started)
        if pins is None:
            self._counters.add(lookup_failures=1)
            return 0, None
        return pins.count // len(self.ranks), pins

    def onboard(self, digests: list[bytes]) -> int:
        """Ask the tiers below the pool for leading blocks. Returns how many come, or are there."""
        keys = self._keys(digests)

        def ask(attachment: Attachment) -> int:
            return attachment.cache(self.ranks[0]).onboard(keys)

        found = self._connection.attempt("asking lower tiers for blocks", ask) or 0
        return -(-found // len(self.ranks))

    def saved(self, tokens: int, seconds: float) -> None:
        """Let the server count tokens that the engine loads, and the time that computing them would
        have taken. The next call to the server takes this along.
        """

        def note(attachment: Attachment) -> None:
            attachment.client.report.saved(tokens, seconds)

        self._connection.attempt("counting", note)

    def release(self, pins: Pins | None) -> None:
        """Release the pins of :meth:`pin`."""
        if pins is not None and pins.count > 0:
            self._connection.attempt(
                "releasing blocks", lambda a: a.cache(self.ranks[0]).release(pins)
            )

    def _keys(self, digests: list[bytes]) -> NDArray[np.uint64]:
        packed = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(digests), -1)
        # The keys of one block for all ranks are adjacent, so leading hits are whole blocks.
        return np.stack([fold(rank, packed) for rank in self.ranks], axis=1).reshape(-1, 2)

    def _adapter(self, lora: Any) -> bytes:
        if lora is None:
            return b""
        name = (lora.lora_name, lora.lora_path)
        # vLLM reads an adapter that is loaded in place again for each request.
        found = None if getattr(lora, "load_inplace", False) else self._adapters.get(name)
        if found is None:
            if len(self._adapters) >= ADAPTERS_MAX:
                self._adapters.clear()
            found = hashlib.blake2b(adapter_identity(lora), digest_size=32).digest()
            self._adapters[name] = found
        return found
