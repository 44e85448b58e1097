# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The key-value cache: it stores and fetches KV blocks by key (``csrc/kvcache/``)."""

from beluga.kvcache.buffers import Blocks, Buffer, Fragments, Run
from beluga.kvcache.cache import (
    BLOCK_SIZE_MAX,
    CHUNK_SIZE,
    Digests,
    GetResult,
    KVCache,
    PutResult,
)
from beluga.kvcache.explain import Explanation, explain
from beluga.kvcache.hints import HintResult, hint_level
from beluga.kvcache.keys import Namespace, fold, hash_keys
from beluga.kvcache.known import KnownNamespace, known_namespaces, namespaces_changed_ns

__all__ = [
    "BLOCK_SIZE_MAX",
    "CHUNK_SIZE",
    "Blocks",
    "Buffer",
    "Digests",
    "Explanation",
    "Fragments",
    "GetResult",
    "HintResult",
    "KVCache",
    "KnownNamespace",
    "Namespace",
    "PutResult",
    "Run",
    "explain",
    "fold",
    "hash_keys",
    "hint_level",
    "known_namespaces",
    "namespaces_changed_ns",
]
