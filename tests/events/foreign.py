# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Readers of foreign routers, written from their published layouts and rules (November 2026):

* :class:`LlmdRouter`: llm-d-router, pkg/kvevents (vllm_adapter.go, pool.go, zmq_subscriber.go,
  event_dedup_filter.go) and pkg/kvcache/kvblock (in_memory.go; pseudo_pods.go of #2586). The hash
  of a request's blocks is internal to its index, so that Python's tuples serve as hashes.
* :class:`DynamoStore`: Dynamo, lib/llm/src/kv_router/shared_cache (#14965).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

_MESSAGES_MAX = 200  # processed at once: a test may repeat the table all the time
Key = tuple[Any, ...]


def chain(tokens: Sequence[int], size: int, model: str, parent: Key = ()) -> list[Key]:
    """Return the keys of whole blocks of a request."""
    keys, before = [], parent or (model,)
    for first in range(0, len(tokens) - size + 1, size):
        before = (hash(before), *tokens[first : first + size])
        keys.append(before)
    return keys


class LlmdIndex:
    """The index of blocks by pod, and the rules by which events change it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.pods: dict[Key, set[tuple[str, str]]] = {}
        self.keys: dict[int, list[Key]] = {}  # by the engine's hash
        self.stores: dict[str, Counter[tuple[str, int]]] = {}
        self.skipped = 0

    def apply(self, topic: bytes, payload: bytes) -> None:
        """Apply a message; a malformed one raises."""
        parts = topic.decode().split("@")
        assert len(parts) == 3 and parts[0] == "kv", topic
        pod, model = parts[1:]
        batch = msgspec.msgpack.decode(payload)
        assert len(batch) == 3 and isinstance(batch[0], float)
        for event in batch[1]:
            kind, *fields = event
            if kind == "AllBlocksCleared":
                self.clear(pod)
            elif kind == "BlockStored":
                self._stored(pod, model, *fields)
            else:
                assert kind == "BlockRemoved"
                self._removed(pod, *fields)

    def clear(self, pod: str) -> None:
        for entries in self.pods.values():
            entries -= {entry for entry in entries if entry[0] == pod}
        self.stores.pop(pod, None)

    def score(self, tokens: Sequence[int], model: str, workers: Sequence[str]) -> dict[str, int]:
        """Return how many leading blocks count for each worker."""
        counts = dict.fromkeys(workers, 0)
        for worker in workers:
            for key in chain(tokens, self.block_size, model):
                pods = {pod for pod, _ in self.pods.get(key, ())}
                if worker not in pods and not any(pod.startswith("pool:") for pod in pods):
                    break
                counts[worker] += 1
        return counts

    def _stored(self, pod: str, model: str, *fields: Any) -> None:
        hashes, parent, tokens, size, _, medium = (*fields, None, None)[:6]
        assert isinstance(size, int) and all(isinstance(token, int) for token in tokens)
        names, tier = [_hash(value) for value in hashes], (medium or "gpu").lower()
        before: Key = ()
        if parent is not None and _hash(parent) != 0:
            if _hash(parent) not in self.keys:
                self.skipped += 1
                return
            before = self.keys[_hash(parent)][-1]
        keys = chain(tokens, self.block_size, model, before)
        if not keys:
            known = [self.keys[name][-1] for name in names if name in self.keys]
            if tokens or not known:
                self.skipped += 1
                return
            keys = known
        else:
            ratio = len(keys) // len(names)
            assert ratio * len(names) == len(keys)
            for number, name in enumerate(names):
                self.keys[name] = keys[number * ratio : (number + 1) * ratio]
        for key in keys:
            self.pods.setdefault(key, set()).add((pod, tier))
        self.stores.setdefault(pod, Counter()).update((tier, name) for name in names)

    def _removed(self, pod: str, hashes: list[Any], medium: str | None = None, *_: Any) -> None:
        tier = (medium or "gpu").lower()
        stores = self.stores.setdefault(pod, Counter())
        for name in map(_hash, hashes):
            stores[tier, name] -= 1
            if stores[tier, name] > 0:  # another announcement of it
                continue
            del stores[tier, name]
            keys = self.keys.get(name, [])
            for key in keys:
                self.pods.get(key, set()).discard((pod, tier))
            if not any(self.pods.get(key) for key in keys):
                self.keys.pop(name, None)


def _miss(live: Any, text: bytes) -> None:
    payload = b""
    while text not in payload:
        assert live.poll(30_000)
        payload = live.recv_multipart()[2]


def _hash(value: Any) -> int:
    """Return a hash; an integer below 2^32 is none for Go's decoder."""
    if isinstance(value, int):
        assert value >= 1 << 32
        return value
    assert isinstance(value, bytes) and value
    return int.from_bytes(value[-8:], "big")


class LlmdRouter:
    """A subscriber, with a replay endpoint or without."""

    def __init__(self, context: Any, live: str, replay: str = "", *, block_size: int) -> None:
        self.index = LlmdIndex(block_size)
        self._context, self._replay_at = context, replay
        self._live = context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"kv@")
        if live.startswith("bind:"):
            self._live.bind(live.removeprefix("bind:"))
        else:
            self._live.connect(live)
        self.last: int | None = None
        self.last_live: int | None = None
        self.resets = self.replays = 0
        if replay:
            self.replay(0)

    def close(self) -> None:
        self._live.close(linger=0)

    def poll(self) -> LlmdRouter:
        """Process what has arrived."""
        for _ in range(_MESSAGES_MAX):
            if not self._live.poll(10):
                break
            topic, number, payload = self._live.recv_multipart()
            self._received(topic, struct.unpack(">Q", number)[0], payload)
        return self

    def miss(self, text: bytes) -> None:
        """Lose all messages up to one that contains ``text``."""
        _miss(self._live, text)

    def replay(self, first: int) -> bool:
        """Request all messages from a number on. Returns whether it was complete."""
        self.replays += 1
        expected = first
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._replay_at)
            dealer.send_multipart([b"", struct.pack(">Q", first)])
            while dealer.poll(30_000):
                frames = dealer.recv_multipart()
                frames = frames[1:] if not frames[0] else frames
                if len(frames) == 3 and not frames[2]:
                    break
                assert len(frames) == 3
                if struct.unpack(">Q", frames[1])[0] != expected:
                    return self._invalid()
                self._apply(frames[0], expected, frames[2])
                expected += 1
        if expected == first and first > 0:
            return self._invalid()
        return True

    def _invalid(self) -> bool:
        self._reset()
        return False

    def _reset(self) -> None:
        self.resets += 1
        for pod in {pod for pods in self.index.pods.values() for pod, _ in pods}:
            if pod.startswith("pool:"):
                self.index.clear(pod)
        self.last = None

    def _received(self, topic: bytes, number: int, payload: bytes) -> None:
        if not self._replay_at:
            self.index.apply(topic, payload)
            return
        if self.last_live is not None and number < self.last_live:
            self._reset()
            self.replay(0)
        if number == self.last_live:
            return
        self.last_live = number
        if self.last is not None and number <= self.last:
            return
        gap = self.last is not None and number > self.last + 1
        late = self.last is None and number > 0
        first = 0 if self.last is None else self.last + 1
        if (gap or late) and not self.replay(first):
            return
        if self.last is None or number == self.last + 1:
            self._apply(topic, number, payload)

    def _apply(self, topic: bytes, number: int, payload: bytes) -> None:
        self.index.apply(topic, payload)
        self.last = number


class DynamoStore:
    """The residency of objects, and the chains of hashes learned from workers."""

    def __init__(self, context: Any, live: str, prefix: str) -> None:
        self._live = context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(live)
        self._prefix = prefix
        self.sequence: int | None = None
        self.digests: dict[int, bytes] = {}
        self.edges: dict[tuple[int | None, int], int] = {}
        self.errors = 0

    def learn(self, parent: int | None, contents: Sequence[int], names: Sequence[int]) -> None:
        """Learn from a worker's own event: the contents of blocks and the engine's hashes."""
        for local, name in zip(contents, names, strict=True):
            self.edges[parent, local] = name
            parent = name

    def poll(self) -> DynamoStore:
        """Process what has arrived."""
        for _ in range(_MESSAGES_MAX):
            if not self._live.poll(10):
                break
            self._received(self._live.recv_multipart())
        return self

    def miss(self, text: bytes) -> None:
        """Lose all messages up to one that contains ``text``."""
        _miss(self._live, text)

    def hits(self, contents: Sequence[int]) -> int:
        """Return the number of leading blocks that the store has."""
        parent: int | None = None
        for count, local in enumerate(contents):
            parent = self.edges.get((parent, local))
            if parent not in self.digests:
                return count
        return len(contents)

    def _received(self, frames: list[bytes]) -> None:
        assert sum(map(len, frames)) <= 1 << 20
        _, number, payload = frames
        at_ms, events, dp_rank = msgspec.msgpack.decode(payload, type=tuple[int, list[Any], int])
        assert at_ms > 0 and dp_rank >= 0 and len(events) <= 4096
        sequence = struct.unpack(">Q", number)[0]
        if self.sequence is not None and sequence != self.sequence + 1:
            self.errors += 1
            self.digests.clear()
        self.sequence = sequence
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        assert event["tenant_id"] in ("", "default")
        kind = event["event_type"]
        if kind == "cleared":
            self.digests.clear()
            return
        prefix, _, digest = event["object_key"].rpartition("@")
        if prefix != self._prefix:
            return
        assert len(digest) == 64 and event["medium"] in ("cpu", "disk")
        low = int(digest[-16:], 16)
        assert self.digests.get(low, bytes.fromhex(digest)) == bytes.fromhex(digest)
        if kind == "stored":
            self.digests[low] = bytes.fromhex(digest)
        else:
            assert kind == "removed"
            self.digests.pop(low, None)
