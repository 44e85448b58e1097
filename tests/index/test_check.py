# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool check finds damage that is planted by hand, and nothing in a healthy pool."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plants import PLANTS, Ground, Plant

from beluga import Pool
from beluga.index import check_pool
from beluga.index.check import KINDS

COUNT = 24
SHAPES = {
    "one": {"devices": 1},
    "interleaved": {"devices": 2},
    "row": {"devices": 3, "interleave": False, "coherence": "software"},
}

# The server of epoch 1 stops; that of epoch 2 and its client are killed in the middle of their
# work.
HISTORY = """
import os, signal, sys
import numpy as np
from beluga import KVCache, IndexServer, Pool
from beluga.index import chain_names
pool = Pool.open(sys.argv[2:])
blocks = np.random.default_rng(3).integers(0, 256, (COUNT, 100_000), dtype=np.uint8)
names = [bytes([i]) * 16 for i in range(COUNT)]
chain = chain_names(range(1, COUNT + 1), range(1, COUNT + 1), block_tokens=16)
with IndexServer(pool), KVCache(pool, namespace="check") as cache:
    assert cache.put(names[:10], blocks[:10], names=chain[:10]).stored == 10
server = IndexServer(pool)
server.start()
cache = KVCache(pool, namespace="check")
assert cache.put(names, blocks, names=chain).stored == COUNT - 10
assert cache.put([bytes([99]) * 16], blocks[:1, :9000]).stored == 1
for _ in range(5):
    assert cache.lookup(names) == COUNT
os.kill(os.getpid(), signal.SIGKILL)
""".replace("COUNT", str(COUNT))


@pytest.fixture(scope="module", params=SHAPES)
def paths(request: pytest.FixtureRequest, memory_root: Path) -> Iterator[list[Path]]:
    """The devices of a dead pool with COUNT + 1 committed blocks, written by epoch 2 (half 0)."""
    shape = dict(SHAPES[request.param])
    with tempfile.TemporaryDirectory(prefix="beluga-test-", dir=memory_root) as folder:
        paths = [Path(folder) / f"device{i}" for i in range(shape.pop("devices"))]
        rest: dict[str, Any] = {"sparse": True, "max_blocks": 200, "lane_count": 4, **shape}
        Pool.create(paths, device_size=(192 << 20) // len(paths), **rest).close()
        ended = subprocess.run([sys.executable, "-c", HISTORY, "-", *map(str, paths)], check=False)
        assert ended.returncode == -signal.SIGKILL
        yield paths


@pytest.fixture
def ground(paths: list[Path]) -> Iterator[Ground]:
    with Pool.open(paths) as pool:
        ground = Ground(pool)
        yield ground
        ground.undo()


def kinds(findings: tuple[str, ...]) -> set[str]:
    return {finding.split()[0] for finding in findings}


def test_a_healthy_pool_has_no_findings(ground: Ground) -> None:
    report = check_pool(ground.pool, payload=True)
    assert report.findings == ()
    assert (report.epoch, report.session_count) == (2, 1)
    assert report.block_count == COUNT + 1
    assert report.block_bytes == COUNT * 100_000 + 9000


def test_a_check_of_a_pool_writes_nothing(ground: Ground) -> None:
    end = ground.pool.geometry.data_offset
    before = [bytes(ground.at(offset)) for offset in range(0, end, 64)]
    check_pool(ground.pool, payload=True)
    assert before == [bytes(ground.at(offset)) for offset in range(0, end, 64)]


def test_a_pool_that_was_never_served_has_no_findings(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=16 << 20, sparse=True) as pool:
        report = check_pool(pool, payload=True)
        assert (report.epoch, report.block_count, report.findings) == (0, 0, ())


@pytest.mark.parametrize(
    "plant", PLANTS, ids=[f"{plant.kind}-{number}" for number, plant in enumerate(PLANTS)]
)
def test_damage_is_found(ground: Ground, plant: Plant) -> None:
    plant.plant(ground)
    report = check_pool(ground.pool, payload=plant.payload)
    assert plant.kind in kinds(report.findings)
    assert kinds(report.findings) <= {plant.kind} | plant.also
    assert report.finding_count == len(report.findings)
    ground.undo()
    assert check_pool(ground.pool, payload=True).findings == ()


def test_every_kind_of_finding_is_planted() -> None:
    assert set(KINDS.values()) == {plant.kind for plant in PLANTS}
    assert len(KINDS) > 40


def test_payload_is_checked_on_request_only(ground: Ground) -> None:
    for plant in PLANTS:
        if plant.kind == "payload-damaged":
            plant.plant(ground)
    assert check_pool(ground.pool).findings == ()


def test_the_older_of_two_entries_is_reported(ground: Ground) -> None:
    ours, newer = ground.read("bl_entry", ground.entry(8)), ground.read("bl_entry", ground.entry(9))
    assert ours.generation < newer.generation
    ground.forge_entry(9, key=list(ours.key))
    (text,) = check_pool(ground.pool).findings
    assert text.startswith("entry-twice block 8: ")


def test_findings_beyond_the_buffer_are_counted(ground: Ground) -> None:
    for block in range(COUNT):
        ground.flip(ground.entry(block), 8)
    report = check_pool(ground.pool)
    assert report.finding_count == COUNT
    assert report.findings[0] == (
        "entry-damaged block 0: the check value of the entry is wrong; it reads as a miss"
    )
