# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The key-value cache: it stores and fetches KV blocks by key (``csrc/kvcache/``)."""

from beluga.kvcache.buffers import BLOCK_SIZE_MAX, Blocks, Buffer, Fragments, Run
from beluga.kvcache.cache import (
    CHUNK_SIZE,
    Digests,
    GetResult,
    HintResult,
    KVCache,
    PutResult,
    hint_level,
)
from beluga.kvcache.explain import Explanation, explain
from beluga.kvcache.keys import (
    KnownNamespace,
    Namespace,
    fold,
    hash_keys,
    known_namespaces,
    namespaces_changed_ns,
)
from beluga.kvcache.ring import OpTicket, OpWorker

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
    "OpTicket",
    "OpWorker",
    "PutResult",
    "Run",
    "explain",
    "fold",
    "hash_keys",
    "hint_level",
    "known_namespaces",
    "namespaces_changed_ns",
]
