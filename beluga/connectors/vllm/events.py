# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""KV events in vLLM's schema: a block is announced when all ranks have stored it in the pool.

A hybrid model's blocks are those of its groups of layers: each event has the number of its group.
The medium is SHARED, the locality REMOTE and the owner the pool, so that routers that read these
fields (Dynamo's and Beluga's) do not credit the blocks to this worker alone. There are no events
for evictions, because engines are not notified of them. llm-d reads none of these fields: for it
the pool's server publishes, and the engine's announcements are turned off.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beluga.connectors.vllm.steps import StoredCounts
from beluga.conventions import EVENTS_USER
from beluga.errors import ConnectorError
from beluga.listening import read_token
from beluga.router import TOKENS_TAG, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from beluga.connectors.vllm.steps import StepReport

MEDIUM = "SHARED"
OWNER = "pool:beluga"
UNSENT_MAX = 256  # messages with token ids that the server has not read
PENDING_MAX = 1 << 16  # blocks being saved; older ones are dropped without an event


@dataclasses.dataclass(slots=True)
class Announcement:
    """The contents of vLLM's BlockStored for a block."""

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: list[int]
    lora_name: str | None
    extra_keys: Sequence[Any] | None
    group: int = 0
    stored: StoredCounts = dataclasses.field(default_factory=lambda: StoredCounts(0, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The blocks of a request in one group of layers: the engine's number of the group, the tokens
    of a block, and their hashes.
    """

    number: int
    size: int
    hashes: Sequence[bytes]


class Announcements:
    """Tracks blocks from the order to save them until the last rank has stored them."""

    def __init__(self, *, rank_count: Callable[[], int], block_size: int) -> None:
        self._rank_count, self._block_size = rank_count, block_size
        self._pending: OrderedDict[bytes, Announcement] = OrderedDict()
        self._ready: list[Announcement] = []

    def ordered(
        self,
        digest: bytes,
        request: Any,
        block: int,
        extra_keys: Sequence[Any] | None,
        *,
        group: GroupBlocks | None = None,
    ) -> None:
        """Record that block number ``block`` of a request will be saved under ``digest``. ``group``
        has the block (default: the model's only group).
        """
        group = group or GroupBlocks(0, self._block_size, request.block_hashes)
        size, hashes = group.size, group.hashes
        self._pending[digest] = Announcement(
            bytes(hashes[block]),
            bytes(hashes[block - 1]) if block else None,
            list(request.all_token_ids[block * size : (block + 1) * size]),
            request.lora_request.lora_name if request.lora_request else None,
            extra_keys,
            group.number,
        )
        if len(self._pending) > PENDING_MAX:
            self._pending.popitem(last=False)

    def reported(self, report: StepReport) -> None:
        """Process the ranks' report of stored blocks."""
        for digest, stored in report.stored.items():
            announcement = self._pending.get(digest)
            if announcement is None:
                continue
            announcement.stored.ranks += stored.ranks
            announcement.stored.new += stored.new
            if announcement.stored.ranks >= self._rank_count():
                del self._pending[digest]
                if announcement.stored.new:
                    self._ready.append(announcement)

    def take(self) -> list[Announcement]:
        """Return the blocks that were stored since the last call."""
        ready, self._ready = self._ready, []
        return ready


@lru_cache
def ownership_of(event: type) -> dict[str, str]:
    """Return the fields that name the pool in an event of this class: none in older vLLM."""
    fields = {"locality": "REMOTE", "ownership": OWNER}
    return fields if fields.keys() <= inspect.signature(event).parameters.keys() else {}


class TokenFeed:
    """Sends token ids of blocks to the pool's server, for routers that index tokens. Messages that
    the server does not read are dropped. Raises ConnectorError for an invalid endpoint.
    """

    def __init__(self, endpoint: str, *, model: str, token_file: str = "") -> None:
        import zmq

        self._model, self._again, self._nowait = model, zmq.Again, zmq.DONTWAIT
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, UNSENT_MAX)
        if token_file:
            self._socket.setsockopt(zmq.PLAIN_USERNAME, EVENTS_USER)
            self._socket.setsockopt(zmq.PLAIN_PASSWORD, read_token(Path(token_file)).secret)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectorError(
                f"beluga's setting events_replay is {endpoint!r}: {error.strerror}; give the "
                "endpoint of beluga serve --events-replay"
            ) from None

    def send(self, space: int, size: int, names: Sequence[int], tokens: Sequence[int]) -> None:
        """Send the tokens of consecutive blocks of ``size`` tokens; ``names`` are their hashes."""
        for message in pack_tokens(space, self._model, size, names, tokens):
            try:
                self._socket.send_multipart([TOKENS_TAG, message], self._nowait)
            except self._again:
                return

    def close(self) -> None:
        """Close the connection. Unsent messages are dropped."""
        self._context.destroy(linger=0)
