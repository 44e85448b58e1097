# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A hostile server and its client in one process: ``python liar.py DIRECTORY CASES``.

CASES is a JSON list of [end, length, chunk_size, verify]: a record ``end`` pages before the end of
the pool's data, and a matching entry, for blocks of that shape. The program prints a line for each
call and its result, so a call that ends the process is named in the last line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from support.forge import LINE, PAGE, line_hash, write

from beluga._ffi import ffi, lib
from beluga.errors import BelugaError
from beluga.index import BlockState, IndexClient
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.rpc import Client, Server
from beluga.transfer import CpuEngine

BLOCK, GENERATION = 3, 1 << 40


def plant(pool: Pool, half: int, key: Any, fingerprint: int, case: list[int]) -> bytes:
    """Return a record and a matching entry."""
    pages, length, chunk_size = case[:3]
    offset = pool.geometry.size - pages * PAGE
    fields = {"generation": GENERATION, "offset": offset, "length": length}
    entry = ffi.new(
        "bl_entry *",
        {
            **fields,
            "key": [int(word) for word in key[0]],
            "fingerprint": fingerprint,
            "chunk_size": chunk_size,
            "state": lib.BL_ENTRY_COMMITTED,
        },
    )
    raw = bytes(ffi.buffer(entry))[:60] + bytes(4)
    number = half * pool.geometry.block_count_max + BLOCK
    line = raw[:60] + line_hash(raw, BLOCK).to_bytes(4, "little")
    write(pool, pool.geometry.table_offset + number * LINE, line)
    fields["length"] = min(length, max(pages, 1) * PAGE)  # fits, whatever the entry contains
    record = ffi.new("bl_block_record *", {**fields, "block": BLOCK})
    return bytes(ffi.buffer(record))


def main(directory: Path, cases: list[list[int]]) -> None:
    """Try every case with every function that reads or writes."""
    pool = Pool.create([directory / "a"], device_size=16 << 20, sparse=True, max_blocks=64)
    word = b""
    states = {
        lib.BL_METHOD_LOOKUP: BlockState.HIT,
        lib.BL_METHOD_RESERVE: BlockState.GRANTED,
        lib.BL_METHOD_COMMIT: BlockState.HIT,
    }
    head = bytes(ffi.buffer(ffi.new("bl_block_reply *", {"count": 1})))

    def handler(state: BlockState) -> Callable[[bytes], bytes]:
        return lambda _: head + word[:24] + int(state).to_bytes(4, "little") + word[28:]

    server = Server(pool)
    for method, state in states.items():
        server.handle(method, handler(state))
    for method in (lib.BL_METHOD_RELEASE, lib.BL_METHOD_ABORT):
        server.handle(method, lambda _: head)
    server.start()
    client = Client(pool)
    half = client.stat().epoch % 2
    for case in cases:
        _, length, chunk_size, verify = case
        target = np.zeros((1, length), np.uint8)
        for engine in (None, CpuEngine(pool)):
            settings = {} if engine is None else {"engine": engine}
            cache = KVCache(
                client,
                namespace="liar",
                chunk_size=chunk_size,
                check_checksums=bool(verify),
                **settings,
            )
            key = cache.keys([bytes(16)])
            word = plant(pool, half, key, cache.fingerprint, case)
            index = IndexClient(client)
            calls: dict[str, Callable[[], object]] = {
                "get": lambda c=cache, k=key, t=target: c.get(k, t).hits,
                "put": lambda c=cache, k=key, t=target: c.put(k, t).stored,
                "lookup": lambda m=index, k=key: len(m.lookup(k).hits),
            }
            for name, call in calls.items():
                print(json.dumps([case, name, engine is not None]), flush=True)
                try:
                    outcome: object = call()
                except BelugaError as error:
                    outcome = type(error).__name__
                print(json.dumps(outcome), flush=True)
    pool.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
