# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A process that copies with an engine gets real signals in pairs, like Ctrl-C pressed twice."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from beluga import IndexServer, KVCache, Pool
from tests.kvcache.conftest import digests, payload

SCRIPT = Path(__file__).with_name("signals_process.py")
STRIPE, COUNT, LENGTH, WANTED = 2 << 20, 4, 1 << 20, 40
THEIRS = 1 << 30  # the first of our keys, which the process does not use


def test_pairs_of_signals_do_not_damage_blocks(shm: Path) -> None:
    """An interrupted put releases its space only after its last byte is written, so another session
    that gets the space reads what it wrote itself.
    """
    paths, dice = [shm / "a", shm / "b"], random.Random(5)
    blocks = payload(COUNT, LENGTH, seed=99)
    with (
        Pool.create(paths, device_size=12 * STRIPE, coherence="hardware", sparse=True) as pool,
        IndexServer(pool),
        KVCache(pool, namespace="test", engine="cpu") as cache,
        subprocess.Popen(
            [sys.executable, SCRIPT, str(WANTED), *paths], stdout=subprocess.PIPE, text=True
        ) as child,
    ):
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        found = np.zeros((COUNT, LENGTH), np.uint8)
        turn = 0
        while child.poll() is None:
            time.sleep(dice.uniform(0, 0.003))
            for _ in range(2):
                child.send_signal(signal.SIGINT)
                time.sleep(dice.uniform(0, 0.0003))
            keys = digests(COUNT, start=THEIRS + turn * COUNT)
            stored = cache.put(keys, blocks).stored
            result = cache.get(keys[:stored], found[:stored])
            assert (result.hits, result.mismatches) == (stored, 0)
            assert np.array_equal(found[:stored], blocks[:stored])
            cache.remove(keys)
            turn += 1
        assert child.returncode == 0
        assert int(child.stdout.read()) == WANTED
        stat = cache.stat()
        assert (stat.grant_count, stat.pinned_count) == (0, 0)
