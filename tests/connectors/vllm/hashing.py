# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The connector in an engine under test, with a log of the hash of every block that it moves.

Lines of BELUGA_TEST_HASHES are ``save DIGEST HASH`` for saved blocks, and ``load DIGEST HASH`` for
the engine's memory after a load. The hashes are computed from the engine's own tensors.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from typing import Any

import beluga.connectors.vllm
from beluga.connectors.vllm.connector import BelugaConnector
from beluga.index import BlockState

figures = beluga.connectors.vllm.figures

__all__ = ["HashingConnector", "figures"]


class HashingConnector(BelugaConnector):
    """Logs hashes of what it saves and loads."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        saves, loads = self._worker.saves, self._worker.loads.sides
        layouts = saves._source.layouts
        log = open(os.environ["BELUGA_TEST_HASHES"], "a", buffering=1)  # noqa: PTH123, SIM115

        def hash_of(block: int, group: int) -> str:
            digest = hashlib.blake2b(digest_size=16)
            for address, size in layouts[group].fragments([block]).tolist():
                digest.update(ctypes.string_at(address, size))
            return digest.hexdigest()

        read, account = saves._source.read, saves._account
        copied: list[str] = []

        def read_hashed(block_ids: Any, group: int = 0) -> Any:
            copied[:] = [hash_of(block, group) for block in block_ids]
            return read(block_ids, group)

        def account_hashed(digests: bytes, count: int, result: Any, group: int) -> None:
            account(digests, count, result, group)
            for index in range(count):
                if result.states[index] == BlockState.GRANTED:
                    name = digests[32 * index : 32 * index + 32].hex()
                    log.write(f"save {name} {copied[index]}\n")

        def load_hashed(load: Any, span: Any) -> int:
            hits: int = load(span)
            if span.split:  # other ranks have stored it, with other heads together
                return hits
            for index, block in enumerate(span.block_ids[:hits]):
                name = span.digests[32 * index : 32 * index + 32].hex()
                log.write(f"load {name} {hash_of(block, span.group)}\n")
            return hits

        saves._source.read = read_hashed  # type: ignore[method-assign]
        saves._account = account_hashed  # type: ignore[method-assign]
        for side in loads:
            side._load = functools.partial(load_hashed, side._load)  # type: ignore[method-assign]
