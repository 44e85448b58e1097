# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rendezvous: an engine's scheduler learns the namespaces of its workers from the pool.

vLLM's OffloadingConnector passes nothing from a worker's spec to the scheduler's. Only a worker
knows its blocks' layout and packing; only the scheduler looks blocks up. So each rank stores a card
under the engine's id, and the scheduler reads until it has the cards of all ranks.

A user may choose the engine's id, which may then stay the same after a restart with another model.
So a card has the time of its writing, and the scheduler ignores a card from before its own process
began. (If an engine spans hosts, their clocks must agree to the second.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga.kvcache import Namespace

if TYPE_CHECKING:
    from beluga.connectors.connection import Attachment

CARD_SIZE = 1 << 16
CLOCK_SLACK_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of one engine. ``salt`` separates it from other tenants."""

    engine_id: str
    salt: str

    def leave(self, attachment: Attachment, rank: int, namespace: Namespace) -> bool:
        """Store a rank's card in place of an older one. Returns whether it is stored now."""
        text = json.dumps({"fields": dict(namespace.fields), "written_s": time.time()}).encode()
        card = np.frombuffer(text.ljust(CARD_SIZE), dtype=np.uint8).reshape(1, -1)
        cache, name = attachment.cache(self._namespace()), [_name(rank)]
        cache.remove(name)
        return cache.put(name, card).stored == 1

    def look(self, attachment: Attachment, world_size: int, since_s: float) -> list[Namespace]:
        """Return the namespaces of all ranks, in order, or none while a card is missing or too
        old.
        """
        cards = np.zeros((world_size, CARD_SIZE), dtype=np.uint8)
        names = [_name(rank) for rank in range(world_size)]
        if attachment.cache(self._namespace()).get(names, cards).hits < world_size:
            return []
        read: list[dict[str, Any]] = [json.loads(bytes(card)) for card in cards]
        if min(card["written_s"] for card in read) < since_s - CLOCK_SLACK_S:
            return []
        return [Namespace(card["fields"], salt=self.salt) for card in read]

    def _namespace(self) -> Namespace:
        return Namespace(
            {"rendezvous": "vllm offloading", "engine": self.engine_id}, salt=self.salt
        )


def _name(rank: int) -> bytes:
    return hashlib.blake2b(f"rank {rank}".encode(), digest_size=32).digest()
