# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The other process of ``linkpath.py``: a cache that puts until its input ends."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np

from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.transfer import Link

from .linkmodel import BLOCK
from .linkpath import NAMESPACE, digest

_BATCH = 4  # blocks in a put


def main(directory: str | None, number: int, paths: list[str]) -> None:
    """Put until the input ends. Each block is removed afterward, so that there is always space."""
    blocks = np.ones((_BATCH, BLOCK), np.uint8)
    ends = sys.stdin.fileno()
    os.set_blocking(ends, False)
    with Pool.open(paths) as pool:
        link = directory and Link("bench", pool=pool, directory=Path(directory))
        with KVCache(pool, namespace=NAMESPACE, link=link or None) as cache:
            print("ready", flush=True)
            for turn in itertools.count(1):
                if _ended(ends):
                    return
                names = [digest(number << 60 | turn << 8 | index)[0] for index in range(_BATCH)]
                cache.put(names, blocks)
                cache.remove(names)


def _ended(handle: int) -> bool:
    try:
        return os.read(handle, 1) == b""
    except BlockingIOError:
        return False


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
