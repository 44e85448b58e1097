# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts and gets until COUNT signals have interrupted it: ``signals_process COUNT DEVICE...``.

The process prints ``ready`` when it expects signals; its last line has the number of interrupted
puts and gets. The software DSA queue copies.
"""

from __future__ import annotations

import itertools
import signal
import sys
from pathlib import Path
from types import FrameType

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.interrupts import within_beluga
from support.soft_dsa import soft_engine

from beluga import KVCache, Pool
from tests.kvcache.conftest import digests, payload

COUNT, LENGTH = 3, 1 << 20


def _on_signal(number: int, frame: FrameType | None) -> None:
    if within_beluga(frame):
        raise KeyboardInterrupt


def main() -> None:
    """Continue until enough calls were interrupted; then a put and a get must succeed."""
    wanted = int(sys.argv[1])
    mine, found = payload(COUNT, LENGTH, seed=7), np.zeros((COUNT, LENGTH), np.uint8)
    with Pool.open([Path(path) for path in sys.argv[2:]]) as pool:
        cache = KVCache(pool, namespace="test", engine=soft_engine(pool))
        signal.signal(signal.SIGINT, _on_signal)
        print("ready", flush=True)
        interrupted = 0
        for number in itertools.count():
            keys = digests(COUNT, start=number * COUNT)
            try:
                cache.put(keys, mine)
                if cache.get(keys, found).hits == COUNT:
                    assert np.array_equal(found, mine)
            except KeyboardInterrupt:
                interrupted += 1
            removed(cache, keys)
            if interrupted >= wanted:
                break
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        keys = digests(COUNT, start=1 << 20)
        assert cache.put(keys, mine).stored == COUNT
        found[:] = 0
        assert cache.get(keys, found).hits == COUNT
        assert np.array_equal(found, mine)
        cache.close()
    print(interrupted)


def removed(cache: KVCache, keys: list[bytes]) -> None:
    """Remove blocks, with retries after signals."""
    while True:
        try:
            cache.remove(keys)
            return
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
