# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Pools whose devices have different coherence modes, used by processes of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import roles
from support.blocks import eventually
from support.emulation import long
from support.role import Process

from beluga.index import check_pool
from beluga.pool import Pool

CHAINS = 12
MIXED = [
    ["hardware", "software"],
    long(["software", "hardware"]),
    long(["hardware", "software", "hardware"]),
]


def hits(server: Process) -> int:
    found = re.search(r"\bhit_count=(\d+)", server.request("stat"))
    assert found
    return int(found[1])


@pytest.mark.parametrize("interleave", [True, long(False)], ids=["interleaved", "one by one"])
@pytest.mark.parametrize("modes", MIXED, ids=",".join)
def test_processes_share_blocks_on_a_mixed_pool(
    shm: Path, modes: list[str], interleave: bool
) -> None:
    paths = [shm / str(index) for index in range(len(modes))]
    with Pool.create(
        paths, device_size=24 << 20, coherence=modes, interleave=interleave, sparse=True
    ) as pool:
        assert [device.coherence for device in pool.devices] == modes
        churn(pool, paths)


@pytest.mark.parametrize("metadata", ["hardware", long("software")])
def test_processes_share_blocks_on_a_pool_with_a_metadata_device(shm: Path, metadata: str) -> None:
    paths, first = [shm / "0", shm / "1"], shm / "metadata"
    with Pool.create(
        paths,
        device_size=24 << 20,
        coherence="software",
        metadata=first,
        metadata_coherence=metadata,
        sparse=True,
    ) as pool:
        churn(pool, [*paths, first])


def churn(pool: Pool, paths: list[Path]) -> None:
    """Run a server, and processes that write, read and remove blocks; no byte is wrong."""
    with Process(roles.serve_index, paths) as server:
        workers = [Process(roles.churn, paths) for _ in range(2)]
        for seed, worker in enumerate(workers):
            worker.send(f"go {seed} {CHAINS}")
        assert eventually(lambda: hits(server) > 200, timeout_s=120)
        results = [json.loads(worker.request("enough")) for worker in workers]
        assert [worker.end() for worker in workers] == [0, 0]
        assert server.end() == 0
    assert [worker["wrong"] for worker in results] == [0, 0]
    report = check_pool(pool, payload=True)
    assert (report.finding_count, report.block_count > 0) == (0, True), report.findings
