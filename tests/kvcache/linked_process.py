# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A process for ``test_linked_processes.py`` that puts or gets over the host's link.

It prints a line when it starts, and continues until its input ends.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import numpy as np

from beluga import KVCache, Pool
from beluga.transfer import Link, LinkSettings, Speed

LENGTH = 1 << 20
COUNT = 4
PIECE = 64 << 10
RATE = 32 << 20
SLOW = LinkSettings(
    read=Speed(RATE),
    write=Speed(RATE),
    device=None,
    duplex=False,
    piece_size=PIECE,
    shares=(8, 4, 1, 1),
)


def digests(first: int) -> list[bytes]:
    return [b"%032d" % (first + number) for number in range(COUNT)]


def main(directory: str, paths: str, what: str) -> None:
    blocks = np.ones((COUNT, LENGTH), np.uint8)
    with Pool.open(paths.split(":")) as pool:
        link = Link("host", SLOW, pool=pool, directory=Path(directory))
        with KVCache(pool, namespace="test", link=link, timeout_s=60) as cache:
            os.set_blocking(sys.stdin.fileno(), False)
            print("ready", flush=True)
            for turn in itertools.count():
                if sys.stdin.buffer.raw.read(1) == b"":
                    break
                if what == "put":
                    assert cache.put(digests(COUNT * (turn + 1)), blocks).stored == COUNT
                    cache.remove(digests(COUNT * (turn + 1)))
                else:
                    assert cache.get(digests(0), blocks).hits == COUNT
            print(sum(one.unthrottled for one in cache.transfer_stats().values()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
