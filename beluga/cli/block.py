# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands on blocks: ``beluga put``, ``get``, ``explain``, ``ls`` and ``rm``."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from beluga.cli.frame import Argument, BadParameter, Exit, Legend, Option, OptionGroup, explains
from beluga.cli.options import (
    Host,
    Json,
    PoolPaths,
    check_output,
    open_pool,
    read_at_most,
    write_whole,
)
from beluga.cli.output import print_json, print_note, print_table
from beluga.errors import CacheError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from beluga.kvcache import KnownNamespace, KVCache, Namespace
    from beluga.pool import Pool

_ONBOARD_S = 30.0  # seconds without progress of the lower tiers
_DIGEST = re.compile(r"(?:[0-9a-fA-F]{2}){16,64}")


def _not_empty(text: str) -> str:
    if not text:
        raise BadParameter("it is empty; give a text")
    return text


Key = Annotated[
    str,
    Argument(
        parser=_not_empty,
        help="The block's key: any text, or 32 to 128 hex digits of a digest.",
    ),
]


BlockNamespace = Annotated[str, Option(parser=_not_empty, help="The namespace of the block.")]


def digest(key: str) -> bytes:
    """Return the digest in hex digits, or the hash of any other text."""
    if _DIGEST.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.blake2b(os.fsencode(key), digest_size=16).digest()


def put(
    key: Key,
    file: Annotated[Path, Argument()],
    pool: PoolPaths = None,
    host: Host = None,
    namespace: BlockNamespace = "cli",
    force: bool = False,
    json: Json = False,
) -> None:
    """Store a file as a block. If the key already has other content, the command fails, unless
    --force replaces it.

    FILE: The file with the block's content; - is standard input.
    --force: Replace the block if the key already has other content.
    """
    from beluga.kvcache import BLOCK_SIZE_MAX, KVCache
    from beluga.pool import STRIPE_SIZE

    with open_pool(pool) as opened:
        room = opened.geometry.stripe_count * STRIPE_SIZE
        data = read_at_most(min(BLOCK_SIZE_MAX, room), file, "a block of this pool")
        if not data:
            raise BadParameter(f"{file} is empty; give at least one byte")
        with KVCache(opened, namespace=namespace, host=host) as cache:
            state = _put(cache, key, data, force=force)
    if json:
        print_json({"key": digest(key).hex(), "bytes": len(data), "state": state})
    else:
        print_note(f"{state}: {len(data)} bytes")


def _put(cache: KVCache, key: str, data: bytes, *, force: bool) -> str:
    """Store a block, and return the outcome as text. Raises CacheError if the key has other
    content.
    """
    state = _put_new(cache, key, data)
    if state != "present":
        return state
    stored = _fetch(cache, key)
    if stored == data:
        return state
    if not force:
        what = "is gone again" if stored is None else f"has other content ({len(stored)} bytes)"
        raise CacheError(f"'{key}' {what}; nothing was stored; use --force to replace it")
    cache.remove([digest(key)])
    if (state := _put_new(cache, key, data)) == "present":
        raise CacheError(f"another client has stored '{key}' at the same time; try again")
    return "replaced" if state == "stored" else state


def _put_new(cache: KVCache, key: str, data: bytes) -> str:
    result = cache.put([digest(key)], [data])
    result.raise_for_refused()
    return "stored" if result.stored else "present" if result.present else "pending"


def _fetch(cache: KVCache, key: str) -> bytes | None:
    """Return a block's content, or None if neither the pool nor a lower tier has it."""
    from beluga.index import IndexClient

    index, keys = IndexClient(cache.client), cache.keys([digest(key)])
    hits = index.lookup(keys, peek=True).hits
    if not hits and cache.onboard([digest(key)]):
        cache.onboard([digest(key)], wait_s=_ONBOARD_S)
        hits = index.lookup(keys, peek=True).hits
    data = bytearray(hits[0].length) if hits else bytearray()
    return bytes(data) if hits and cache.get([digest(key)], [data]).hits else None


def get(
    key: Key,
    file: Annotated[Path, Argument()] = Path("-"),
    pool: PoolPaths = None,
    host: Host = None,
    namespace: BlockNamespace = "cli",
    json: Json = False,
) -> None:
    """Fetch a block. The exit status is 1 if it does not exist.

    FILE: The file to write the block's content to; - is standard output.
    """
    from beluga.kvcache import KVCache

    if file != Path("-"):
        check_output(file)
    elif json:
        raise BadParameter("--json needs a FILE for the block's content")
    with open_pool(pool) as opened, KVCache(opened, namespace=namespace, host=host) as cache:
        data = _fetch(cache, key)
    if data is None:
        raise CacheError(
            f"there is no block '{key}' in the namespace '{namespace}'; see 'beluga explain'"
        )
    if file == Path("-"):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        write_whole(file, data)
    if json:
        print_json({"key": digest(key).hex(), "bytes": len(data), "file": str(file)})


Keys = Annotated[
    list[str],
    Argument(
        parser=_not_empty,
        metavar="KEY...",
        help="Keys: any text, or 32 to 128 hex digits of a digest.",
    ),
]
_FINGERPRINT = re.compile("[0-9a-f]{16}")
_NAMED = 5  # keys listed in an error
_NAMESPACE = "cli"  # the default


def _namespace_of(
    namespace: Annotated[str, Option(parser=_not_empty)] = _NAMESPACE,
    field: list[str] | None = None,
    salt: str = "",
) -> Callable[..., Any]:
    """Return a function that returns the namespace in a pool.

    --namespace: The namespace: its name, or its fingerprint of 16 digits, as in `beluga ls`.
    --field NAME=VALUE: A field of the namespace, such as dtype=bfloat16, instead of --namespace.
        Repeat the option for each field. Digits are a number.
    --salt: The salt of the namespace.
    """
    return partial(_namespace_in, name=namespace, fields=field, salt=salt)


NamespaceOf = Annotated[Callable[..., Any], OptionGroup(_namespace_of)]


def _namespace_in(pool: Pool, name: str, fields: list[str] | None, salt: str) -> Namespace:
    """Return the namespace of the options."""
    from beluga.kvcache import Namespace, known_namespaces

    if fields:
        if name != _NAMESPACE:
            raise BadParameter(
                f"--field and --namespace {name} exclude each other; give one of them"
            )
        pairs = [text.partition("=")[::2] for text in fields]
        if invalid := [t for t, (n, _) in zip(fields, pairs, strict=True) if not n or "=" not in t]:
            raise BadParameter(f"--field {invalid[0]} is not NAME=VALUE; give a name and a value")
        names = [name for name, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadParameter(f"--field names {twice[0]} twice; give each field once")
        return Namespace({n: int(v) if v.isdecimal() else v for n, v in pairs}, salt=salt)
    for recorded in known_namespaces(pool.runtime_dir):
        if f"{recorded.fingerprint:016x}" == name:
            namespace = Namespace(recorded.fields, salt=salt)
            if namespace.fingerprint != recorded.fingerprint:
                raise CacheError(f"the namespace {name} has a salt; give it with --salt")
            return namespace
    if _FINGERPRINT.fullmatch(name):
        print_note(
            f"this host has opened no namespace with the fingerprint {name}, so it is taken as a "
            "name (see 'beluga ls --namespaces')"
        )
    return Namespace({"name": name}, salt=salt)


def explain_keys(
    keys: Keys,
    pool: PoolPaths = None,
    host: Host = None,
    *,
    namespace_of: NamespaceOf,
    json: Json = False,
) -> None:
    """Show why each key hits or misses. The exit status is 1 if one misses.

    A key is a hash that includes its namespace: the model, dtype, layout, rank and salt of a block.
    Blocks stored with a salt need --salt; blocks of namespaces that only other hosts opened cannot
    be found.
    """
    from beluga.kvcache import explain
    from beluga.rpc import Client

    with open_pool(pool) as opened, Client(opened, host=host) as client:
        named = namespace_of(opened)
        explanations = explain(client, named, [digest(key) for key in keys])
    if json:
        print_json(
            [
                {"name": key} | asdict(explanation)
                for key, explanation in zip(keys, explanations, strict=True)
            ]
        )
    else:
        for key, explanation in zip(keys, explanations, strict=True):
            click.echo(f"{key}: {explanation.state}, {explanation.cause}: {explanation.text}")
    if any(explanation.state == "miss" for explanation in explanations):
        raise Exit(1)


_BLOCKS = Legend(
    {
        "key": "the hash of the block's digest and its namespace, in hex",
        "namespace": "the namespace's name if it has no other fields, otherwise its fingerprint",
        "bytes": "the size of the block",
        "epoch": "the epoch of the server that allocated the block",
    }
)
_SPACES = Legend(
    {
        "namespace": "the namespace's fingerprint",
        "blocks": "the number of its blocks in the pool",
        "bytes": "their size in bytes",
        "fields": "the fields of the namespace: a name, or model, dtype, layout and so on",
    }
)


@explains(_BLOCKS, _SPACES)
def ls(
    pool: PoolPaths = None,
    host: Host = None,
    namespaces: bool = False,
    limit: Annotated[int, Option(min=1)] = 100,
    json: Json = False,
) -> None:
    """List the pool's blocks or, with --namespaces, their namespaces.

    The key in the list is the hash of a block's digest and its namespace, from which the key given
    to put cannot be derived.

    --namespaces: Show the namespaces of the blocks, with their fields.
    --limit: The largest number of blocks to show.
    """
    from beluga.kvcache import known_namespaces
    from beluga.rpc import Client

    with open_pool(pool) as opened, Client(opened, host=host) as client:
        half = client.stat().epoch % 2
        spaces = {space.fingerprint: space for space in known_namespaces(opened.runtime_dir)}
        rows = _spaces(opened, half, spaces) if namespaces else _blocks(opened, half, spaces, limit)
    if json:
        print_json(rows)
    elif not rows:
        print_note("no blocks")
    else:
        legend = _SPACES if namespaces else _BLOCKS
        print_table(legend, [[row[name] for name in legend] for row in rows])


def _blocks(
    pool: Pool, half: int, spaces: Mapping[int, KnownNamespace], limit: int
) -> list[dict[str, object]]:
    from beluga.index import EPOCH_SHIFT

    lines = islice((line for lines in _committed(pool, half) for line in lines), limit)
    return [
        {
            "key": f"{int(line['key'][0]):016x}{int(line['key'][1]):016x}",
            "namespace": _shown(int(line["fingerprint"]), spaces),
            "bytes": int(line["length"]),
            "epoch": int(line["generation"]) >> EPOCH_SHIFT,
        }
        for line in lines
    ]


def _spaces(pool: Pool, half: int, spaces: Mapping[int, KnownNamespace]) -> list[dict[str, object]]:
    blocks: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for lines in _committed(pool, half):
        for line in lines:
            blocks[int(line["fingerprint"])] += 1
            sizes[int(line["fingerprint"])] += int(line["length"])
    return [
        {
            "namespace": f"{of:016x}",
            "blocks": count,
            "bytes": sizes[of],
            "fields": _fields(spaces[of]) if of in spaces else "opened by other hosts only",
        }
        for of, count in blocks.most_common()
    ]


def _committed(pool: Pool, half: int) -> Iterator[NDArray[np.void]]:
    from beluga.index import COMMITTED, read_entries

    for lines in read_entries(pool, half):
        yield lines[lines["state"] == COMMITTED]


def _shown(fingerprint: int, spaces: Mapping[int, KnownNamespace]) -> str:
    """Show a namespace by its name if it has no other fields, otherwise by its fingerprint."""
    namespace = spaces.get(fingerprint)
    if namespace is not None and set(namespace.fields) == {"name"} and not namespace.secret:
        return str(namespace.fields["name"])
    return f"{fingerprint:016x}"


def _fields(namespace: KnownNamespace) -> str:
    shown = [f"{name}={value}" for name, value in namespace.fields.items()]
    return " ".join([*shown, *(["(and a salt)"] if namespace.secret else [])])


def rm(
    keys: Keys,
    pool: PoolPaths = None,
    host: Host = None,
    *,
    namespace_of: NamespaceOf,
    json: Json = False,
) -> None:
    """Remove blocks. The exit status is 1 if one of them does not exist.

    Clients that are reading a block may finish. Lower tiers remove it soon afterwards.
    """
    from beluga.kvcache import KVCache

    with open_pool(pool) as opened:
        named = namespace_of(opened)
        with KVCache(opened, namespace=named, host=host) as cache:
            removed = {key: _remove(cache, digest(key)) for key in keys}
    if json:
        print_json(removed)
    missing = [key for key, removed_from in removed.items() if not removed_from]
    if not json and len(missing) < len(removed):
        print_note(f"removed: {len(removed) - len(missing)} of {len(removed)}{_where(removed)}")
    if missing:
        names = ", ".join(f"'{key}'" for key in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise CacheError(f"there is no block {names}{more} in that namespace; see 'beluga explain'")


def _remove(cache: KVCache, name: bytes) -> list[str]:
    """Remove a block, and return where it was: in the pool, in a lower tier, or "unknown": possibly
    in a remote tier, which has yet to execute the removal.
    """
    from beluga.index import BlockState, IndexClient

    index, key = IndexClient(cache.client), cache.keys([name])
    below = int(index.tiers(key)[0]) & ~1 != 0
    unknown = not below and index.lookup(key, peek=True).state == BlockState.BELOW
    removed_from = ["pool"] if cache.remove([name]) else []
    return removed_from + ["lower tier"] * below + ["unknown"] * (unknown and not removed_from)


def _where(removed: Mapping[str, list[str]]) -> str:
    """Describe the blocks that were not in the pool."""
    below = sum(removed_from == ["lower tier"] for removed_from in removed.values())
    unknown = sum(removed_from == ["unknown"] for removed_from in removed.values())
    text = ""
    if below:
        text += f"; {below} of them only from a lower tier"
    if unknown:
        text += f"; {unknown} uncertain: a remote tier, which may not have them, removes them later"
    return text
