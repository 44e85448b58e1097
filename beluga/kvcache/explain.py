# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Explains why a key hits or misses, as far as the pool and this host can show it.

There are three sources: the server, which remembers why recent keys were evicted or removed; both
halves of the block table, where a free line still has the key of its last block; and the namespaces
that were opened on this host, under each of which the key is computed again. A key is a hash that
includes its namespace. So a block stored with a salt, or in a namespace that only another host has
opened, cannot be found.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from beluga.index import (
    COMMITTED,
    EPOCH_SHIFT,
    FREE,
    BlockState,
    Field,
    IndexClient,
    IndexStat,
    RemovalReason,
    read_entries,
)
from beluga.kvcache.cache import KVCache
from beluga.kvcache.keys import KnownNamespace, Namespace, fold, known_namespaces
from beluga.rpc import Client

# Field names of the connectors (beluga/connectors/). Another number of ranks or another dtype also
# changes the layout, so the first kind of difference in this order is reported as the cause.
_PARALLEL = ("tp", "pp", "cp", "dp", "ep", "attn_cp", "dcp", "pcp")
_KINDS = {
    "rank": {
        *("rank", "kv_rank", "world_size", *_PARALLEL),
        *(f"{name}_{part}" for name in _PARALLEL for part in ("rank", "size")),
    },
    "dtype": {"dtype", "kv_dtype", "quantization", "dsa_kv_cache_store_fp8"},
    "layout": {
        *("layout", "packing", "layers", "device", "form", "block_size", "page_size", "pool"),
        *("chunk_tokens", "layer_num", "start_layer", "end_layer", "size_per_token", "group"),
        *("head_num", "head_dim", "v_head_dim", "head_group_num", "kv_cache_dim", "object_group"),
        *("storage_format_tag", "target_layer_num"),
    },
}
_FOLLOWS_DTYPE = {"model_config"}  # a section that an engine may write its dtype into

_PENDING = (
    "a client is writing it, or it is being fetched from a lower tier; it hits when that is done, "
    "and misses if the client gives up or dies"
)
_EPOCH = (
    "the server of epoch {} had it, but that of epoch {} does not: it was lost in the takeover, or "
    "evicted since"
)

_LEFT = {
    RemovalReason.SPACE: ("evicted", "it was here, and was evicted to make room"),
    RemovalReason.ENTRY: (
        "evicted",
        "it was here, and was evicted because the block table was full: blocks are smaller than "
        "the pool was made for, so recreate it with --block-bytes or a larger --max-blocks",
    ),
    RemovalReason.REMOVED: ("removed", "it was here, and was removed by a client"),
    RemovalReason.RETIRED: ("evicted", "it was here, and was dropped with memory that failed"),
}

_LEFT_BEFORE = (
    "it was here before this server took over, and was evicted to make room or removed by a client"
)

Key = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one key. ``cause`` is one word: stored, pending, below, checksum,
    namespace, layout, dtype, rank, salt, evicted, removed, epoch or never. ``text`` is a sentence.
    """

    key: str
    state: str  # "hit", "pending" or "miss"
    cause: str
    text: str


@dataclasses.dataclass(slots=True)
class _Table:
    """The lines of both halves of the block table for some keys."""

    now: dict[Key, np.void]  # committed, in the serving half
    left: set[Key]  # a free line of the serving half has the key
    before: dict[Key, np.void]  # committed, in the predecessor's half
    left_before: set[Key]  # a free line of the predecessor's half has the key
    counts: Counter[int]  # committed blocks by fingerprint


def explain(client: Client, namespace: Namespace, digests: Sequence[bytes]) -> list[Explanation]:
    """Explain each digest's key in ``namespace``. Raises an RpcError if no server answers."""
    index, pool = IndexClient(client), client.pool
    epoch, stat = client.stat().epoch, index.stat()
    known = known_namespaces(pool.runtime_dir)
    others = {
        one.fingerprint: _keys(made, digests)
        for one in known
        if (made := _made(one, namespace)) and one.fingerprint != namespace.fingerprint
    }
    keys = _keys(namespace, digests)
    table = _read(client, epoch, {*keys, *(key for made in others.values() for key in made)})
    found, now = [], table.now
    lost = index.removal_reasons(np.array(keys, np.uint64).reshape(-1, 2))
    for at, (key, digest) in enumerate(zip(keys, digests, strict=True)):
        state = index.lookup(np.array([key], np.uint64), peek=True).state
        there = [o for o in known if o.fingerprint in others and others[o.fingerprint][at] in now]
        if state == BlockState.HIT:
            cause, text = _hit(client, namespace, digest, table.now.get(key))
        elif state == BlockState.PENDING:
            cause, text = "pending", _PENDING
        elif state == BlockState.BELOW:
            cause, text = "below", "the pool does not have it, but a lower tier has or may have"
        elif there:
            nearest = min(there, key=lambda one: _distance(_differing(namespace, one)))
            cause, text = _difference(namespace, nearest)
        elif lost[at] in _LEFT:
            cause, text = _LEFT[lost[at]]
        elif key in table.left:
            cause, text = _left(stat)
        elif key in table.before:
            cause, text = "epoch", _EPOCH.format(epoch - 1, epoch)
        elif key in table.left_before:
            cause, text = "evicted", _LEFT_BEFORE
        else:
            cause, text = _nowhere(namespace, table, known, stat)
        verdict = {"stored": "hit", "pending": "pending"}.get(cause, "miss")
        found.append(Explanation(digest.hex(), verdict, cause, text))
    return found


def _keys(namespace: Namespace, digests: Sequence[bytes]) -> list[Key]:
    """Return the key of each digest: digests of different sizes do not fit into one array."""
    return [(int(key[0]), int(key[1])) for one in digests for key in fold(namespace, [one])]


def _read(client: Client, epoch: int, wanted: set[Key]) -> _Table:
    table = _Table({}, set(), {}, set(), Counter())
    firsts = np.array([key[0] for key in wanted], np.uint64)
    for half in (epoch % 2, 1 - epoch % 2):
        for lines in read_entries(client.pool, half):
            if half == epoch % 2:
                committed = lines["fingerprint"][lines["state"] == COMMITTED]
                for value, count in zip(*np.unique(committed, return_counts=True), strict=True):
                    table.counts[int(value)] += int(count)
            for line in lines[np.isin(lines["key"][:, 0], firsts)]:
                key = int(line["key"][0]), int(line["key"][1])
                if line["state"] == COMMITTED:
                    (table.now if half == epoch % 2 else table.before)[key] = line
                elif line["state"] == FREE:
                    (table.left if half == epoch % 2 else table.left_before).add(key)
    return table


def _hit(
    client: Client, namespace: Namespace, digest: bytes, entry: np.void | None
) -> tuple[str, str]:
    """Read a block that the server has, as an engine would: its bytes may be damaged."""
    if entry is None:
        return "stored", "the server has it"
    length, chunk_size = int(entry["length"]), int(entry["chunk_size"])
    cache = KVCache(client, namespace=namespace, chunk_size=chunk_size, onboard=False)
    try:
        got = cache.get([digest], [bytearray(length)])
    finally:
        cache.close()
    if got.hits:
        return "stored", (
            f"{length} bytes with a checksum for every {chunk_size}, written in epoch "
            f"{int(entry['generation']) >> EPOCH_SHIFT}; an engine that expects another size "
            "misses it"
        )
    if got.mismatches:
        return "checksum", (
            "its bytes are not those that were committed, so it reads as a miss; remove it "
            "(beluga rm) and check the pool (beluga pool check --payload)"
        )
    return (
        "stored",
        "the server has it, but it was replaced or evicted while it was read; try again",
    )


def _left(stat: IndexStat) -> tuple[str, str]:
    """Explain a key that only a free line has. The line does not show the reason, but the counters
    may.
    """
    if stat.remove_count == 0:
        return "evicted", "it was here, and was evicted to make room"
    if stat.evict_count + stat.table_evict_count == 0:
        return "removed", "it was here, and was removed by a client"
    return "evicted", "it was here, and was either evicted or removed by a client"


def _nowhere(
    requested: Namespace, table: _Table, known: Sequence[KnownNamespace], stat: IndexStat
) -> tuple[str, str]:
    """Explain a key that left no trace: it may have a salt, or was never stored."""
    salted = sum(
        table.counts[one.fingerprint]
        for one in known
        if one.secret
        and one.fingerprint != requested.fingerprint
        and dict(one.fields) == dict(requested.fields)
    )
    if salted:
        return "salt", (
            f"{salted} blocks are stored under the same fields with another salt; give the salt to "
            "check whether this key is one of them (--salt)"
        )
    named = {requested.fingerprint, *(one.fingerprint for one in known)}
    strange = sum(count for of, count in table.counts.items() if of not in named)
    text = (
        "nothing in this pool shows that it was ever stored, in this namespace or another one "
        "that this host opened without a salt; the trace of an evicted block is lost when its "
        "table line is reused"
    )
    if evicted := stat.evict_count:
        text += (
            f"; {evicted} blocks were evicted since this server took over, and it may be one of "
            "those whose trace is lost"
        )
    if strange > 0:
        text += (
            f"; {strange} blocks are of namespaces that only other hosts opened, so it may be one "
            "of them"
        )
    return "never", text


def _made(one: KnownNamespace, requested: Namespace) -> Namespace | None:
    """Return a namespace with what its keys need, or None if its secret is unknown: a salt other
    than that of the question.
    """
    made = Namespace(one.fields, salt=requested.salt if one.secret else b"")
    return made if made.fingerprint == one.fingerprint else None


def _differing(requested: Namespace, there: KnownNamespace) -> list[str]:
    """Return the fields in which two namespaces differ. The digest of a whole section of an
    engine's configuration is included only if no other field differs, because such a field is often
    part of the section as well.
    """
    mine, theirs = dict(requested.fields), dict(there.fields)
    names = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
    return [n for n in names if not n.startswith("config ")] or names


def _foreign(names: Sequence[str]) -> set[str]:
    """Return the fields among these that concern something other than the model's layout."""
    foreign = set(names).difference(*_KINDS.values())
    return foreign - _FOLLOWS_DTYPE if _KINDS["dtype"].intersection(names) else foreign


def _distance(names: Sequence[str]) -> tuple[int, int]:
    """Return the distance to a namespace that differs in these fields. One of the same model is
    nearer.
    """
    return len(_foreign(names)), len(names)


def _difference(requested: Namespace, there: KnownNamespace) -> tuple[str, str]:
    """Describe the difference between the namespace of the question and the one that has the
    key.
    """
    mine, theirs = dict(requested.fields), dict(there.fields)
    names = _differing(requested, there)
    if not names:
        return "salt", "it is stored without a salt, under the same fields; drop --salt to find it"
    foreign = _foreign(names)
    kinds = (kind for kind, of in _KINDS.items() if of.intersection(names) and not foreign)
    kind = next(kinds, "namespace")
    shown = ", ".join(f"{n} is {_value(theirs, n)} there and {_value(mine, n)} here" for n in names)
    if requested.salted and not there.secret:
        shown += ", and it has no salt there"
    return kind, f"it is stored in another namespace ({there.fingerprint:016x}): {shown}"


def _value(fields: Mapping[str, Field], name: str) -> str:
    return repr(fields[name]) if name in fields else "missing"
