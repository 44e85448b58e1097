# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""KV events from a router's perspective: what an engine stored and removed, and in which tier; and
their wire format.

A block has two hashes. Its *tokens hash* (local hash) depends only on its contents and is the same
everywhere; indexes are searched by it. Its *block hash* (sequence hash) is the engine's own name
for the block. The router never computes it; it identifies parents and removed blocks. Both have 64
bits; signed values are reinterpreted as unsigned.

vLLM publishes events over ZMQ; the caller owns the sockets. A message has three frames: topic,
sequence number (8 bytes, big-endian), and a batch in msgpack, ``[ts, [events], dp_rank]``. Events
are maps with a ``type``, or arrays that begin with it. Hashes are integers, or digests whose last
64 bits are used, as in vLLM (vllm/distributed/kv_events.py, VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES).
All input is untrusted; malformed input raises EventError.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import reprlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from beluga.errors import EventError, RouterError
from beluga.router.hashing import BlockHasher, salt_of, unsigned, with_extra_keys
from beluga.router.worker import Worker


class Tier(enum.IntEnum):
    """The tiers of blocks, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3  # the pool: a store shared by all workers


# Engines' names of tiers (Dynamo's kv-events-custom-engines.md, and vLLM's STORAGE).
_MEDIUMS = {
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.SHARED,
    "NETWORK": Tier.SHARED,
    "REMOTE": Tier.SHARED,
    "SHARED": Tier.SHARED,
}


def tier_of(medium: str | None) -> Tier:
    """Return the tier for an engine's name; None means the device.

    Raises EventError for an unknown name.
    """
    if medium is None:
        return Tier.DEVICE
    tier = _MEDIUMS.get(medium.upper()) if isinstance(medium, str) else None
    if tier is None:
        raise EventError(f"a KV event has the tier {str(medium)[:40]!r}, which does not exist")
    return tier


@dataclasses.dataclass(slots=True)
class Stored:
    """Consecutive blocks, each the child of the one before. ``tokens_hashes`` is None if the engine
    sends no contents; the blocks were then announced earlier, in another tier.
    """

    block_hashes: Sequence[int]
    tokens_hashes: Sequence[int] | None
    parent_hash: int | None = None  # a block hash; None: the first block has no parent


@dataclasses.dataclass(slots=True)
class Removed:
    """Blocks that were removed from a tier."""

    block_hashes: Sequence[int]


@dataclasses.dataclass(slots=True)
class Cleared:
    """All blocks of one rank were removed from all of its tiers."""


Data: TypeAlias = Stored | Removed | Cleared


@dataclasses.dataclass(slots=True)
class RouterEvent:
    """An event with its sender. ``event_id`` increases by one for each event of a worker; None
    means that the event has no number.
    """

    worker: Worker
    data: Data
    event_id: int | None = None
    tier: Tier = Tier.DEVICE


# From the tokens of some blocks, the LoRA adapter's name and the salt ("" for none) to the tokens
# hashes.
HashBlocks: TypeAlias = Callable[[Sequence[int], str, str], Sequence[int]]

DP_RANKS_MAX = 1024
HASHERS_MAX = 1024  # adapters and salts whose seeds are cached
SALTED_MAX = 1 << 17  # salted blocks remembered per engine; blocks after forgotten ones miss

_END = unsigned(-1)  # the number of the message that ends a replay
_BATCH = ("ts", "events", "data_parallel_rank")
_FIELDS = {  # in the order of the array form
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "session_id",
        "lookahead_token_ids",  # covered by the block hash only: two names for the same contents
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
    "AllBlocksCleared": (),
}
_METADATA = frozenset({"cache_salt", "session_id"})  # of SGLang's map in place of lora_name
# The names in a map. One that is not known could change the meaning of an event.
_NAMES = {
    kind: frozenset({"type", "tokens_hashes", "space", *names}) | _METADATA
    for kind, names in _FIELDS.items()
}
# The kinds of KV cache groups (vLLM's KVCacheSpecKind): a prompt's prefix is found by those of full
# attention. Windows and states hold only some of a prefix.
_FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_PARTIAL = frozenset(
    {
        *("sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba"),
        *("cross_attention", "encoder_only_attention"),
    }
)
_KINDS = _FULL | _PARTIAL


class Frame(NamedTuple):
    """One message."""

    topic: bytes
    sequence: int
    payload: bytes

    @property
    def ends_replay(self) -> bool:
        """Whether this message ends a replay."""
        return self.sequence == _END and not self.payload


def decode_frames(frames: Sequence[bytes]) -> Frame:
    """Split a published message or one of a replay, with or without an empty first frame and a
    topic. Raises EventError for anything else.
    """
    body = list(frames[1:] if len(frames) == 4 and not frames[0] else frames)
    if len(body) == 2:
        body.insert(0, b"")
    if len(body) != 3 or len(body[1]) != 8:
        raise EventError(f"a KV event message has {len(frames)} frames, or frames of invalid sizes")
    frame = Frame(bytes(body[0]), int.from_bytes(body[1], "big"), bytes(body[2]))
    if frame.sequence == _END and frame.payload:
        raise EventError("a KV event message has a payload although its number ends a replay")
    return frame


def replay_request(first: int) -> list[bytes]:
    """Return the frames, for a DEALER socket, that request everything from a number on from vLLM's
    publisher.
    """
    return [b"", first.to_bytes(8, "big")]


def hash_blocks_by(hasher: BlockHasher) -> HashBlocks:
    """Return a function that hashes blocks with the router's hasher."""
    hashers = {(hasher.lora_name, hasher.salt): hasher}

    def hash_blocks(tokens: Sequence[int], adapter: str, salt: str) -> Sequence[int]:
        salted = hashers.get((adapter, salt))
        if salted is None:
            salted = dataclasses.replace(hasher, lora_name=adapter, salt=salt)
            if len(hashers) < HASHERS_MAX:
                hashers[adapter, salt] = salted
        return salted.local(tokens)

    return hash_blocks


@dataclasses.dataclass(slots=True)
class Batch:
    """The events of one message. ``failed`` has an error for each malformed event."""

    worker: Worker
    events: list[RouterEvent]
    failed: list[EventError]


@dataclasses.dataclass(slots=True)
class PoolEvent:
    """An event of a pool's server, with blocks of one space. ``block_size`` is that of stored
    blocks, in tokens.
    """

    data: Data
    space: int = 0
    block_size: int = 0


@dataclasses.dataclass(slots=True)
class PoolBatch:
    """The events of one message of a pool's server. ``unread`` counts malformed ones; ``pool`` is
    the pool's id.
    """

    events: list[PoolEvent]
    unread: int = 0
    pool: str = ""

    @property
    def whole(self) -> bool:
        """Whether the batch is a complete list of the pool's blocks, which replaces all earlier
        events.
        """
        return bool(self.events) and isinstance(self.events[0].data, Cleared)


def decode_pool(payload: bytes) -> PoolBatch:
    """Decode a batch of a pool's events in vLLM's format. Raises EventError if it is malformed."""
    import msgspec

    try:
        decoded = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise EventError(f"a pool's message is not msgpack: {error!s:.80}") from None
    is_named = isinstance(decoded, list) and len(decoded) > 3
    forms, _ = _batch_fields(decoded[:3] if is_named else decoded)
    batch = PoolBatch([], pool=str(decoded[3]) if is_named else "")
    for form in forms:
        try:
            batch.events.append(_pool_event(form))
        except (EventError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            batch.unread += 1
    return batch


def _pool_event(form: Any) -> PoolEvent:
    kind, fields = _event_fields(form)
    if kind == "AllBlocksCleared":
        return PoolEvent(Cleared())
    names = [_name(name) for name in fields["block_hashes"]]
    space = unsigned(int(fields.get("space") or 0))
    if kind == "BlockRemoved":
        return PoolEvent(Removed(names), space)
    contents = [unsigned(int(local)) for local in fields["tokens_hashes"]]
    if len(contents) != len(names):
        raise EventError(f"a pool's event has {len(contents)} contents for {len(names)} blocks")
    parent = fields.get("parent_block_hash")
    stored = Stored(names, contents, None if parent is None else _name(parent))
    return PoolEvent(stored, space, int(fields["block_size"]))


class WireDecoder:
    """Decodes the batches of one engine. The engine and the router must have blocks of
    ``block_size`` tokens.

    An engine sends a salt only with a prompt's first block; the decoder remembers which blocks are
    salted. Blocks whose hash covers images or embeddings get tokens hashes that no router computes,
    so they and the blocks after them never match, and neither do those of an adapter of which only
    the number is known. If an engine has several KV cache groups, the first one of full attention
    counts, or group 0 if the engine does not name their kinds. Raises RouterError if ``block_size``
    is not positive.
    """

    def __init__(
        self,
        worker_id: int,
        *,
        block_size: int,
        hash_blocks: HashBlocks,
        learn: Callable[[int], HashBlocks | None] | None = None,
    ) -> None:
        """``learn`` is called with the block size that the engine announces first, and with each
        other size. It returns a hash function for such blocks, or None if the router keeps its own
        size. Without it, the router always has ``block_size``.
        """
        import msgspec

        if block_size < 1:
            raise RouterError(f"block_size is {block_size}, but must be at least 1")
        self._worker_id, self._block_size = worker_id, block_size
        self._hash_blocks = hash_blocks
        self._learn = learn
        self._agreed = learn is None  # whether the router is known to have this size
        self._salts: dict[int, str] = {}  # by block
        self._group: int | None = 0  # the KV cache group that counts; None until one is known to
        self._kinds_known = False  # whether the engine names the kinds of groups
        self._decode = msgspec.msgpack.Decoder().decode
        self._errors = (msgspec.MsgspecError, RecursionError, ValueError)

    def batch(self, payload: bytes) -> Batch:
        """Decode a batch of events. Raises EventError if the payload is malformed."""
        try:
            decoded = self._decode(payload)
        except self._errors as error:
            raise EventError(
                f"a KV event message is not msgpack: {error!s:.80}; it begins with "
                f"{payload[:16].hex()}"
            ) from None
        forms, dp_rank = _batch_fields(decoded)
        batch = Batch(Worker(self._worker_id, dp_rank), [], [])
        for form in forms:
            try:
                if (event := self._event(form, batch.worker)) is not None:
                    batch.events.append(event)
            except EventError as error:
                batch.failed.append(EventError(f"{error}: {_beginning(form)}"))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                batch.failed.append(
                    EventError(f"a KV event is malformed: {error!r:.80}: {_beginning(form)}")
                )
            except RouterError as error:
                batch.failed.append(EventError(f"a KV event is malformed: {error!r:.80}"))
        return batch

    def _event(self, form: Any, worker: Worker) -> RouterEvent | None:
        kind, fields = _event_fields(form)
        if kind == "AllBlocksCleared":
            self._salts.clear()
            return RouterEvent(worker, Cleared())
        if not self._counts(kind, fields):
            return None
        tier = tier_of(fields.get("medium"))
        names = [_name(name) for name in fields["block_hashes"]]
        if kind == "BlockRemoved":
            return RouterEvent(worker, Removed(names), tier=tier)
        before = fields.get("parent_block_hash")
        parent = None if before is None else _name(before)
        contents = self._contents(fields, names, parent)
        return RouterEvent(worker, Stored(names, contents, parent), tier=tier)

    def _counts(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Return whether an event is of the group that counts, and of blocks near the engine."""
        locality = fields.get("locality")
        if locality not in (None, "LOCAL", "REMOTE"):
            raise EventError(f"a KV event has an unknown locality {locality!r:.40}")
        if locality == "REMOTE" and tier_of(fields.get("medium")) != Tier.SHARED:
            return False  # neither the worker's own nor the pool's, as far as is known
        group, spec = fields.get("group_idx"), fields.get("kv_cache_spec_kind")
        if group is not None and type(group) is not int:
            raise EventError(f"a KV event has the group {group!r:.40}, which is not a number")
        if spec is not None and kind == "BlockStored":
            if spec not in _KINDS:
                raise EventError(f"a KV event has an unknown kind of cache {spec!r:.40}")
            if not self._kinds_known:
                self._kinds_known, self._group = True, None
            if spec in _PARTIAL:
                return False
            if self._group is None:
                self._group = group or 0
        return group is None or group == self._group

    def resize(self, block_size: int, hash_blocks: HashBlocks) -> None:
        """Set the router's new block size, which the engine's events must have."""
        self._block_size, self._hash_blocks, self._agreed = block_size, hash_blocks, True

    def _sized(self, size: int) -> bool:
        """Return whether the router has blocks of this size, or now adopts it."""
        if size == self._block_size and self._agreed:
            return True
        hash_blocks = None if self._learn is None or type(size) is not int else self._learn(size)
        if hash_blocks is not None:
            self.resize(size, hash_blocks)
        return hash_blocks is not None

    def _contents(
        self, fields: Mapping[str, Any], names: Sequence[int], parent: int | None
    ) -> Sequence[int] | None:
        tokens = fields.get("token_ids")
        if not tokens:
            return None
        if not self._sized(fields["block_size"]):
            raise EventError(
                f"worker {self._worker_id} has blocks of {fields['block_size']} tokens, but the "
                f"router has {self._block_size}; give all engines the same size, or set "
                "--block-size"
            )
        if len(tokens) != len(names) * self._block_size:
            raise EventError(f"a KV event has {len(tokens)} tokens for {len(names)} blocks")
        adapter, extra_keys = _adapter(fields), fields.get("extra_keys")
        if own_salt := fields.get("cache_salt"):
            salt = _text(own_salt, "cache_salt")
        elif parent is not None:
            salt = self._salts.get(parent, "")
        else:
            salt = salt_of(extra_keys[0] if extra_keys else None, adapter)
        contents = self._hash_blocks(_tokens(tokens), adapter, salt)
        if salt:
            self._salts.update(dict.fromkeys(names, salt))
            while len(self._salts) > SALTED_MAX:
                del self._salts[next(iter(self._salts))]  # the oldest
        return with_extra_keys(contents, extra_keys, salt=salt, lora_name=adapter)


def _batch_fields(decoded: Any) -> tuple[list[Any], int]:
    if isinstance(decoded, dict):
        others = [value for name, value in decoded.items() if name not in _BATCH]
        decoded = [*map(decoded.get, _BATCH), *others]
    if not isinstance(decoded, list) or len(decoded) < 2 or not isinstance(decoded[1], list):
        raise EventError("a KV event message is not a batch: [ts, [events], dp_rank]")
    if any(value is not None for value in decoded[3:]):
        raise EventError(f"a KV event batch has more than 3 known values: {_beginning(decoded)}")
    dp_rank = decoded[2] if len(decoded) > 2 else None
    made_s = decoded[0]
    if not isinstance(made_s, int | float) or not math.isfinite(made_s):
        raise EventError("a KV event batch has no time")
    if not isinstance(dp_rank or 0, int):
        raise EventError("a KV event batch has a rank that is not a number")
    if not 0 <= int(dp_rank or 0) < DP_RANKS_MAX:
        raise EventError(f"a KV event batch is of rank {dp_rank}; there are {DP_RANKS_MAX} at most")
    return decoded[1], int(dp_rank or 0)


def _event_fields(form: Any) -> tuple[str, Mapping[str, Any]]:
    kind = form.get("type") if isinstance(form, dict) else form[0] if form else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise EventError(f"there is no KV event {kind!r:.40}")
    if isinstance(form, dict):
        unknown = {name for name in form.keys() - _NAMES[kind] if form[name] is not None}
        fields = form
    else:
        fields = dict(zip(_FIELDS[kind], form[1:], strict=False))
        if any(value is not None for value in form[1 + len(_FIELDS[kind]) :]):
            raise EventError(f"a KV event has more than the {len(_FIELDS[kind])} known values")
        metadata = fields.get("lora_name")
        metadata = metadata if isinstance(metadata, dict) else {}  # SGLang: salt and session
        unknown = set(metadata.keys() - _METADATA)
        if metadata:
            fields = {**fields, "lora_name": None, **metadata}
    if unknown:
        raise EventError(f"a KV event has the unknown field {min(map(str, unknown))!r:.40}")
    return kind, fields


def _beginning(form: Any) -> str:
    """Return the first bytes of an event, for a log."""
    return f"{reprlib.repr(form):.80}"


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise EventError(f"a KV event has the {what} {value!r:.40}, which is not a text")
    return value


def _adapter(fields: Mapping[str, Any]) -> str:
    """Return the name of an event's adapter. An adapter of which only the number is known gets a
    name that no request has.
    """
    name, number = fields.get("lora_name"), fields.get("lora_id")
    if name:
        return _text(name, "lora_name")
    return "" if number is None else f"\0lora_id {number!r:.40}"


def _tokens(tokens: Sequence[Any]) -> array[int]:
    """Return the tokens of an event. With speculative decoding SGLang sends pairs of a token and
    the next one. Raises TypeError for other tokens than whole numbers.
    """
    if isinstance(tokens[0], list):
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in tokens):
            raise EventError("a KV event has token_ids that are neither tokens nor pairs of them")
        tokens = [token for token, _ in tokens]
    return array("q", tokens)


def _name(value: Any) -> int:
    if isinstance(value, int):
        return unsigned(value)
    if isinstance(value, bytes):
        return unsigned(int.from_bytes(value, "big"))
    raise EventError(
        f"a KV event has the block hash {value!r:.40}, which is neither a number nor bytes"
    )
