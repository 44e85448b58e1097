# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A process of ``null.py``: a cache that reads until its input ends."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from beluga.errors import BelugaError
from beluga.kvcache import KVCache
from beluga.pool import Pool

from .null import BLOCK, NAMESPACE, blocks_of, digests, link_at, null_gpu


def main(directory: str, count: int, paths: list[str]) -> None:
    """Read the blocks that the parent process put, over its link."""
    names, blocks = digests(count), blocks_of(count)
    ends = sys.stdin.fileno()
    os.set_blocking(ends, False)
    with Pool.open(paths) as pool:
        link = link_at(pool, Path(directory))
        with KVCache(pool, namespace=NAMESPACE, engine=null_gpu(pool), link=link) as cache:
            cache.get(names, blocks)
            print("ready", flush=True)
            before, moved = time.process_time(), 0
            while not _ended(ends):
                if cache.get(names, blocks).hits != count:
                    raise BelugaError("a block was not found that the parent process put")
                moved += count * BLOCK
            took_ms = (time.process_time() - before) * 1e3
            print(took_ms * (1 << 30) / max(moved, 1), flush=True)


def _ended(handle: int) -> bool:
    try:
        return os.read(handle, 1) == b""
    except BlockingIOError:
        return False


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
