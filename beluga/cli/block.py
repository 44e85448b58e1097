# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands ``beluga put`` and ``beluga get``, which store and fetch single blocks."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from beluga.cli.options import Host, Json, PoolPaths, check_output, open_pool, read_at_most
from beluga.cli.output import print_json, say
from beluga.errors import CacheError
from beluga.kvcache import BLOCK_SIZE_MAX, KVCache
from beluga.meta import MetaClient

_DIGEST = re.compile(r"(?:[0-9a-fA-F]{2}){16,64}")

Key = Annotated[
    str, typer.Argument(help="The block's key: any text, or 32 to 128 hex digits of a digest.")
]
Namespace = Annotated[str, typer.Option(help="The namespace of the block.")]


def digest(key: str) -> bytes:
    """Return a digest that is given in hex digits, or else the digest of the text."""
    if _DIGEST.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.blake2b(os.fsencode(key), digest_size=16).digest()


def put(
    key: Key,
    file: Annotated[
        Path, typer.Argument(help="The file with the block's bytes; - is standard input.")
    ],
    pool: PoolPaths = None,
    host: Host = None,
    namespace: Namespace = "cli",
    json: Json = False,
) -> None:
    """Store a file's bytes as a block. A block that exists is not changed."""
    data = read_at_most(BLOCK_SIZE_MAX, file, "a block")
    if not data:
        raise CacheError(f"{file} is empty; a block has at least one byte")
    with open_pool(pool) as opened, KVCache(opened, namespace=namespace, host=host) as cache:
        result = cache.put([digest(key)], [data])
        result.raise_for_refused()
    state = "stored" if result.stored else "present" if result.present else "pending"
    if json:
        print_json({"key": digest(key).hex(), "bytes": len(data), "state": state})
    else:
        say(f"{state}: {len(data)} bytes")


def get(
    key: Key,
    file: Annotated[
        Path, typer.Argument(help="The file to write the block's bytes to; - is standard output.")
    ] = Path("-"),
    pool: PoolPaths = None,
    host: Host = None,
    namespace: Namespace = "cli",
) -> None:
    """Fetch a block. The exit status is 1 if it does not exist."""
    if file != Path("-"):
        check_output(file)
    with open_pool(pool) as opened, KVCache(opened, namespace=namespace, host=host) as cache:
        found = MetaClient(cache.client).lookup(cache.keys([digest(key)])).hits
        data = bytearray(found[0].length) if found else bytearray()
        if not found or cache.get([digest(key)], [data]).hits == 0:
            raise CacheError(f"no block '{key}' in namespace '{namespace}'")
    if file == Path("-"):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        file.write_bytes(data)
