# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The key-value cache: it stores and fetches KV blocks by key (``csrc/kv/``)."""

from beluga.kvcache.buffers import Blocks, Buffer, Fragments, Run
from beluga.kvcache.cache import (
    BLOCK_SIZE_MAX,
    CHUNK_SIZE,
    Digests,
    GetResult,
    KVCache,
    PutResult,
)
from beluga.kvcache.keys import Namespace, fold, hash_keys

__all__ = [
    "BLOCK_SIZE_MAX",
    "CHUNK_SIZE",
    "Blocks",
    "Buffer",
    "Digests",
    "Fragments",
    "GetResult",
    "KVCache",
    "Namespace",
    "PutResult",
    "Run",
    "fold",
    "hash_keys",
]
