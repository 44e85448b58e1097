# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The forms in which the pool's events are published: one encoder for each.

A form has a version in its name, because foreign forms change; the bare name is the newest version.

* ``vllm``: vLLM's maps, with hashes of tokens in place of token ids; for Beluga's gateway.
* ``dynamo``: the events of Dynamo's event plane.
* ``llm-d``: vLLM's arrays under the topic ``kv@pool:NAME@MODEL``, which llm-d's index credits to
  every endpoint (llm-d-router, ``pkg/kvevents``). A block without known tokens is credited if a
  worker has announced its hash before. Hashes are 8 bytes, as llm-d rejects small integers.
* ``mooncake``: objects in the stream of Mooncake's master, for Dynamo's ``mooncake-store``
  (``lib/llm/src/kv_router/shared_cache``). An object's key ends in the block's hash, as 64 hex
  digits: the reader compares the last 16. It accepts 4096 events and 1 MiB in a message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from beluga.errors import RouterError
from beluga.router import Cleared, PoolEvent, Removed, Stored, Tier, TokenStore

Events: TypeAlias = Sequence[PoolEvent]
Message: TypeAlias = tuple[bytes, bytes]
"""The topic and the batch of a message."""

TOPIC = b"kv-events"
RUN_MAX = 1024  # blocks of an event, and of a message of the foreign forms
_MEDIUM = Tier.SHARED.name
_ANY = 0xA5C3_96F0_5A3C_690F  # in place of a hash; above 2^32, so that each has 8 bytes


@dataclasses.dataclass(frozen=True, slots=True)
class EventSource:
    """The pool as routers see it: its id, the name and the model in topics and keys, and the tokens
    of its blocks.
    """

    pool_id: str
    name: str = "beluga"
    model: str = ""
    tokens: TokenStore = dataclasses.field(default_factory=TokenStore)

    def model_of(self, space: int) -> str:
        """Return the name of the model of a space."""
        return self.tokens.model(space) or self.model


Encode: TypeAlias = Callable[[EventSource, float, Events, int], list[Message]]
"""From the source, the time, events, and the number of the first message to messages: one at
least."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How events are published.

    With ``repeats``, the whole table is published now and then, because its readers cannot request
    it. With ``restarts``, message numbers begin at 0 with every repetition: llm-d replays a stream
    from its first message or not at all. ``topics`` are part of replays; ``takes_tokens`` means
    that tokens are accepted at the replay endpoint.
    """

    name: str
    encode: Encode
    repeats: bool = False
    restarts: bool = False
    topics: bool = False
    takes_tokens: bool = False


def form_named(name: str) -> Form:
    """Return a form by its name with or without its version. Raises RouterError for another one."""
    form = FORMS.get(name) or FORMS.get(_NEWEST.get(name, ""))
    if form is None:
        raise RouterError(f"form is {name}; give {', '.join((*_NEWEST, *FORMS))}")
    return form


def encode_pool(made_s: float, events: Events, pool: str = "") -> bytes:
    """Encode a pool's events as a batch in vLLM's format, with the pool's id as a fourth element.

    ``token_ids`` is empty, and two additional fields take its place: ``tokens_hashes`` and
    ``space``.
    """
    return _packed([made_s, [_map(event) for event in events], None, pool])


def _vllm(source: EventSource, made_s: float, events: Events, _: int) -> list[Message]:
    return [(TOPIC, encode_pool(made_s, events, source.pool_id))]


def _map(event: PoolEvent) -> dict[str, Any]:
    data = event.data
    if isinstance(data, Cleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(data, Removed):
        return {
            "type": "BlockRemoved",
            "block_hashes": list(data.block_hashes),
            "medium": _MEDIUM,
            "space": event.space,
        }
    return {
        "type": "BlockStored",
        "block_hashes": list(data.block_hashes),
        "parent_block_hash": data.parent_hash,
        "token_ids": [],
        "block_size": event.block_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
        "tokens_hashes": list(data.tokens_hashes or ()),
        "space": event.space,
    }


def _dynamo(_: EventSource, made_s: float, events: Events, number: int) -> list[Message]:
    return [(TOPIC, _packed([made_s, [_dynamo_event(event, number) for event in events], None]))]


def _dynamo_event(event: PoolEvent, number: int) -> dict[str, Any]:
    """Return an event as in Dynamo's "kv-events" subject."""
    data: str | dict[str, Any] = "cleared"
    if isinstance(event.data, Stored):
        stored = event.data
        blocks = [
            {"block_hash": name, "tokens_hash": local}
            for name, local in zip(stored.block_hashes, stored.tokens_hashes or (), strict=True)
        ]
        data = {"stored": {"parent_hash": stored.parent_hash, "blocks": blocks}}
    elif isinstance(event.data, Removed):
        data = {"removed": {"block_hashes": list(event.data.block_hashes)}}
    return {
        "worker_id": 0,
        "storage_tier": "shared",
        "event": {"event_id": number, "data": data, "dp_rank": 0},
    }


def _llm_d(source: EventSource, made_s: float, events: Events, _: int) -> list[Message]:
    """Encode events in vLLM's arrays, with a topic for each model."""
    messages: list[Message] = []
    arrays: list[list[Any]] = []
    topic, room = _topic(source, source.model), RUN_MAX

    def end() -> None:
        nonlocal arrays, room
        messages.append((topic, _packed([made_s, arrays, None])))
        arrays, room = [], RUN_MAX

    for event in events:
        of_event = topic
        if not isinstance(event.data, Cleared):
            of_event = _topic(source, source.model_of(event.space))
        for array, count in _arrays(source, event):
            if arrays and (of_event != topic or count > room):
                end()
            topic = of_event
            arrays.append(array)
            room -= count
    if arrays or not messages:
        end()
    return messages


def _topic(source: EventSource, model: str) -> bytes:
    return f"kv@pool:{source.name}@{model}".encode()


def _arrays(source: EventSource, event: PoolEvent) -> Iterator[tuple[list[Any], int]]:
    """Yield an event's arrays and the number of their blocks. All blocks of an array have tokens,
    or none: llm-d resolves the latter one by one, without a parent.
    """
    data, space = event.data, event.space
    if isinstance(data, Cleared):
        yield ["AllBlocksCleared"], 1
        return
    names = list(data.block_hashes)
    if isinstance(data, Removed):
        for first in range(0, len(names), RUN_MAX):
            part = names[first : first + RUN_MAX]
            yield ["BlockRemoved", [_bytes(name) for name in part], _MEDIUM], len(part)
        return
    tokens = [source.tokens.of(space, name) for name in names]
    first = 0
    while first < len(names):
        known, stop = tokens[first] is not None, first + 1
        while stop < min(len(names), first + RUN_MAX) and (tokens[stop] is not None) == known:
            stop += 1
        parent = names[first - 1] if first else data.parent_hash
        ids = [token for block in tokens[first:stop] for token in block or ()]
        yield (
            [
                "BlockStored",
                [_bytes(name) for name in names[first:stop]],
                _bytes(parent) if known and parent is not None else None,
                ids,
                event.block_size,
                None,  # lora_id
                _MEDIUM,
            ],
            stop - first,
        )
        first = stop


def _bytes(name: int) -> bytes:
    return name.to_bytes(8, "big")


def _mooncake(source: EventSource, made_s: float, events: Events, _: int) -> list[Message]:
    """Encode one map for each block: all ranks have stored it, so it is one object."""
    import msgspec

    common = {"tenant_id": "default", "backend_id": source.name, "dp_rank": 0}
    maps: list[Any] = []
    for event in events:
        data = event.data
        if isinstance(data, Cleared):
            maps.append({"event_type": "cleared", **common})
            continue
        model = source.model_of(event.space)
        of_event: dict[str, Any] = {
            "event_type": "stored" if isinstance(data, Stored) else "removed",
            "medium": "cpu",
            "model_name": model,
            "block_size": event.block_size,
            **common,
            "object_key": f"{object_prefix(source.name, model)}@{_ANY:064x}",
            "seq_hashes": [_ANY],
        }
        # The maps of an event differ in the hash alone, so that one is encoded for all.
        before, rest = _packed(of_event).split(b"%016x" % _ANY)
        between, after = rest.split(_bytes(_ANY))
        maps += (
            msgspec.Raw(b"".join((before, b"%016x" % name, between, _bytes(name), after)))
            for name in data.block_hashes
        )
    parts = [maps[first : first + RUN_MAX] for first in range(0, len(maps), RUN_MAX)] or [[]]
    return [(b"", _packed([round(made_s * 1e3), part, 0])) for part in parts]


def object_prefix(name: str, model: str) -> str:
    """Return what the keys of a pool's objects begin with, as vLLM's MooncakeStoreConnector names
    them.
    """
    return f"{name}@{model}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0"


def _packed(batch: object) -> bytes:
    import msgspec

    return msgspec.msgpack.encode(batch)


FORMS = {
    form.name: form
    for form in (  # of each form, the oldest version first
        Form("vllm-v1", _vllm),
        Form("dynamo-v1", _dynamo),
        Form("llm-d-v1", _llm_d, repeats=True, restarts=True, topics=True, takes_tokens=True),
        Form("mooncake-v1", _mooncake, repeats=True),
    )
}
"""The forms by name, with their versions."""

_NEWEST = {name.rpartition("-v")[0]: name for name in FORMS}
