# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A batch of one block of 4096 bytes, as C requires it."""

from typing import Any

from beluga._ffi import ffi

TIMEOUT_NS = 5_000_000_000


def batch_of(data: Any) -> tuple[Any, Any, Any]:
    """Make a ``bl_kv_batch *`` for the bytes at ``data``. Its key and its fragment, which must live
    as long as it, are returned, too.
    """
    key = ffi.new("uint64_t[2]", [1, 2])
    address = int(ffi.cast("uintptr_t", data))
    fragment = ffi.new("bl_fragment *", {"address": address, "size": 4096})
    counts = {
        "count": 1,
        "fragment_count": 1,
        "length": 4096,
        "chunk_size": 1024,
        "check_checksums": 1,
    }
    pointers = {"keys": key, "fragments": fragment}
    struct = ffi.new("bl_kv_batch *", counts | pointers | {"timeout_ns": TIMEOUT_NS})
    return struct, key, fragment
