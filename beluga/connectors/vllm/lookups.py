# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How many leading blocks of a request the pool has, for all ranks of the engine, in one call."""

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

    from beluga.connectors.connection import Attachment, Connection
    from beluga.connectors.vllm.counters import Counters
    from beluga.kvcache import Namespace
    from beluga.meta import Pins

ADAPTERS_MAX = 1024  # of which fingerprints are kept


class Lookups:
    """Asks the pool. The ranks' namespaces come with their handshake; before it, all is a miss."""

    def __init__(self, connection: Connection, counters: Counters) -> None:
        self.ranks: tuple[Namespace, ...] = ()
        self._connection = connection
        self._counters = counters
        self._adapters: dict[tuple[str, str], bytes] = {}
        self._era = b""  # after a reset, what sets this engine's blocks apart from those before

    def reset(self) -> None:
        """The engine's weights may have changed: from now on its blocks are its own."""
        self._era = os.urandom(32)

    def digests(self, request: Any, first: int, last: int) -> list[bytes]:
        """What blocks [first, last) of a request hold: vLLM's hashes, and which adapter it was.

        vLLM's hash has an adapter's name; another adapter may have the same name elsewhere.
        """
        hashes: Sequence[bytes] = request.block_hashes[first:last]
        return self.named(hashes, self._adapter(request.lora_request))

    def named(self, hashes: Sequence[bytes], adapter: bytes = b"") -> list[bytes]:
        """Under what blocks of these hashes stand in the pool."""
        key = adapter + self._era
        if not key:
            return list(hashes)
        return [hashlib.blake2b(one, key=key, digest_size=32).digest() for one in hashes]

    def pin(self, digests: list[bytes]) -> tuple[int, Pins | None]:
        """Leading blocks that every rank finds, and the pins that keep them (or None)."""
        if not digests or not self.ranks:
            return 0, None
        started = time.perf_counter()
        packed = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(digests), -1)
        # All ranks' keys of a block, then those of the next: leading hits are whole blocks.
        keys = np.stack([fold(rank, packed) for rank in self.ranks], axis=1).reshape(-1, 2)

        def ask(attachment: Attachment) -> Pins:
            return attachment.cache(self.ranks[0]).pin(keys)

        pins = self._connection.attempt("looking blocks up", ask)
        self._counters.add(lookups=1, lookup_s=time.perf_counter() - started)
        if pins is None:
            self._counters.add(lookup_failures=1)
            return 0, None
        return pins.count // len(self.ranks), pins

    def release(self, pins: Pins | None) -> None:
        """Let go of what :meth:`pin` kept."""
        if pins is not None and pins.count > 0:
            self._connection.attempt(
                "releasing blocks", lambda a: a.cache(self.ranks[0]).release(pins)
            )

    def _adapter(self, lora: Any) -> bytes:
        if lora is None:
            return b""
        name = (lora.lora_name, lora.lora_path)
        # vLLM reads an adapter that is loaded in place anew for each request, whatever is there.
        found = None if getattr(lora, "load_inplace", False) else self._adapters.get(name)
        if found is None:
            if len(self._adapters) >= ADAPTERS_MAX:
                self._adapters.clear()
            found = hashlib.blake2b(adapter_identity(lora), digest_size=32).digest()
            self._adapters[name] = found
        return found
