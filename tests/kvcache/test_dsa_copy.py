# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts and gets with the DSA engine on its software queue survive faults of the queue and the
process. The software queue ends with its process, like a device's work for a process; blocks of
incomplete work were not published.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.soft_dsa import soft_portal

from beluga import IndexServer, KVCache, Pool
from beluga.index import BlockState, check_pool
from beluga.kvcache import CHUNK_SIZE
from beluga.transfer import DsaEngine
from tests.kvcache.conftest import digests, payload

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
STORM = {"fault": 9000, "list_fault": 9000, "full": 9000, "full_run": 4, "error": 2000}


@pytest.mark.parametrize("length", [63, 3 * CHUNK_SIZE - 7, 5 << 19])
def test_cpu_and_faulty_dsa_read_each_others_blocks(
    pool: Pool, server: IndexServer, cache: KVCache, length: int
) -> None:
    faults = {"seed": length, "reorder": 30_000, "late": 9000, **STORM}
    engine = DsaEngine(pool, soft_portal(faults=faults))
    blocks = payload(6, length)
    with KVCache(pool, namespace="test", engine=engine) as by_dsa:
        assert by_dsa.put(digests(3), blocks[:3]).stored == 3
        assert cache.put(digests(3, start=3), blocks[3:]).stored == 3
        for reader in (by_dsa, cache):
            targets = np.zeros_like(blocks)
            result = reader.get(digests(6), targets)
            assert (result.hits, result.mismatches) == (6, 0)
            assert np.array_equal(blocks, targets)
    engine.close()
    assert check_pool(pool, payload=True).finding_count == 0


VICTIM = """
import sys
sys.path.insert(0, "tests")
import numpy as np
from beluga import KVCache, Pool
from beluga.transfer import DsaEngine
from tests.kvcache.conftest import digests
from support.soft_dsa import soft_portal
pool = Pool.open(sys.argv[1:])
engine = DsaEngine(pool, soft_portal(faults={"delay_us": 500_000}))
gather_write = engine.gather_write
def announce(plan):
    transfer = gather_write(plan)
    print("out", flush=True)
    return transfer
engine.gather_write = announce
with KVCache(pool, namespace="test", engine=engine) as cache:
    cache.put(digests(2), np.ones((2, 4 << 20), np.uint8))
print("stored", flush=True)
"""


def test_copies_in_flight_of_a_killed_process_are_never_visible(
    pool: Pool, server: IndexServer, cache: KVCache
) -> None:
    paths = [str(device.path) for device in pool.devices]
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, *paths], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout is not None
    assert victim.stdout.readline() == "out\n"
    states = cache.get(digests(2), np.zeros((2, 4 << 20), np.uint8)).states
    assert BlockState.HIT not in set(states.tolist())
    victim.kill()
    assert "stored" not in victim.communicate()[0]  # the process was killed before its end
    blocks = payload(2, 4 << 20)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        result = cache.put(digests(2), blocks)
        if result.stored + result.present == 2:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    targets = np.zeros_like(blocks)
    assert cache.get(digests(2), targets).hits == 2
    assert np.array_equal(targets, blocks)
    assert check_pool(pool, payload=True).finding_count == 0
