# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Where an engine's scheduler learns the namespaces of its workers: in the pool itself.

vLLM's OffloadingConnector carries nothing from a worker's spec to the scheduler's. Only a worker
knows what its blocks are (their layout and packing); only the scheduler looks them up. So each rank
leaves a card under the engine's id, and the scheduler looks there until it has all of them.

An engine's id may be given by the user, and be the same after a restart with another model. A card
therefore says when it was written: one from before the scheduler's process began is not believed.
(Hosts' clocks must agree to the second, where an engine has more than one host.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga.kvcache import Namespace

if TYPE_CHECKING:
    from beluga.connectors.connection import Attachment

CARD_SIZE = 1 << 16
CLOCK_SLACK_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Rendezvous:
    """The place of one engine. ``salt`` keeps other tenants away from it."""

    engine_id: str
    salt: str

    def leave(self, attachment: Attachment, rank: int, namespace: Namespace) -> bool:
        """Leave a rank's card, in place of an older one; whether it is there now."""
        text = json.dumps({"fields": dict(namespace.fields), "written_s": time.time()}).encode()
        card = np.frombuffer(text.ljust(CARD_SIZE), dtype=np.uint8).reshape(1, -1)
        cache, name = attachment.cache(self._namespace()), [_name(rank)]
        cache.remove(name)
        return cache.put(name, card).stored == 1

    def look(self, attachment: Attachment, world_size: int, since_s: float) -> list[Namespace]:
        """The namespaces of all ranks, in their order; none while a card is missing or older."""
        cards = np.zeros((world_size, CARD_SIZE), dtype=np.uint8)
        names = [_name(rank) for rank in range(world_size)]
        if attachment.cache(self._namespace()).get(names, cards).hits < world_size:
            return []
        read: list[dict[str, Any]] = [json.loads(bytes(card)) for card in cards]
        if min(card["written_s"] for card in read) < since_s - CLOCK_SLACK_S:
            return []
        return [Namespace(card["fields"], salt=self.salt) for card in read]

    def _namespace(self) -> Namespace:
        return Namespace({"meeting": "vllm offloading", "engine": self.engine_id}, salt=self.salt)


def process_start_s() -> float:
    """When this process began, in seconds of :func:`time.time`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # field 22 of the manual page, which counts from 1 and the name's two
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _name(rank: int) -> bytes:
    return hashlib.blake2b(f"rank {rank}".encode(), digest_size=32).digest()
