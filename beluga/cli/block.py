# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands ``beluga put`` and ``beluga get``, for single blocks."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beluga.cli.frame import Argument, BadParameter, Option
from beluga.cli.options import (
    Host,
    Json,
    PoolPaths,
    check_output,
    open_pool,
    read_at_most,
    write_whole,
)
from beluga.cli.output import print_json, print_note
from beluga.errors import CacheError

if TYPE_CHECKING:
    from beluga.kvcache import KVCache

_ONBOARD_S = 30.0  # seconds without progress of the lower tiers
_DIGEST = re.compile(r"(?:[0-9a-fA-F]{2}){16,64}")

Key = Annotated[
    str, Argument(help="The block's key: any text, or 32 to 128 hex digits of a digest.")
]
Namespace = Annotated[str, Option(help="The namespace of the block.")]


def digest(key: str) -> bytes:
    """Return the digest in hex digits, or the hash of any other text."""
    if _DIGEST.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.blake2b(os.fsencode(key), digest_size=16).digest()


def put(
    key: Key,
    file: Annotated[Path, Argument(help="The file with the block's content; - is standard input.")],
    pool: PoolPaths = None,
    host: Host = None,
    namespace: Namespace = "cli",
    force: Annotated[
        bool,
        Option("--force", help=("Replace the block if the key already has other content.")),
    ] = False,
    json: Json = False,
) -> None:
    """Store a file as a block. If the key already has other content, the command fails, unless
    --force replaces it.
    """
    from beluga.kvcache import BLOCK_SIZE_MAX, KVCache
    from beluga.pool import STRIPE_SIZE

    with open_pool(pool) as opened:
        room = opened.geometry.stripe_count * STRIPE_SIZE
        data = read_at_most(min(BLOCK_SIZE_MAX, room), file, "a block of this pool")
        if not data:
            raise CacheError(f"{file} is empty; give at least one byte")
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
    there = _fetch(cache, key)
    if there == data:
        return state
    if not force:
        what = "is gone again" if there is None else f"has other content ({len(there)} bytes)"
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
    found = index.lookup(keys).hits
    if not found and cache.onboard([digest(key)]):
        cache.onboard([digest(key)], wait_s=_ONBOARD_S)
        found = index.lookup(keys).hits
    data = bytearray(found[0].length) if found else bytearray()
    return bytes(data) if found and cache.get([digest(key)], [data]).hits else None


def get(
    key: Key,
    file: Annotated[
        Path, Argument(help="The file to write the block's content to; - is standard output.")
    ] = Path("-"),
    pool: PoolPaths = None,
    host: Host = None,
    namespace: Namespace = "cli",
    json: Json = False,
) -> None:
    """Fetch a block. The exit status is 1 if it does not exist."""
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
