# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool with a metadata device that hardware keeps coherent, and data under software coherence:
hosts, blocks, a takeover, a restart, a repair.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import roles
from support.blocks import held, keys, put
from support.role import Process

from beluga.index import IndexClient, IndexServer, check_pool, repair_pool
from beluga.pool import STRIPE_SIZE, Pool
from beluga.rpc import Client
from beluga.verify import verify_pool

MIB = 1 << 20


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    """The devices, the metadata device in the middle."""
    return [shm / "a", shm / "metadata", shm / "b"]


@pytest.fixture
def pool(paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(
        [paths[0], paths[2]],
        device_size=32 * MIB,
        coherence="software",
        metadata=paths[1],
        metadata_coherence="hardware",
        sparse=True,
        max_blocks=256,
    ) as pool:
        yield pool


def test_hosts_share_the_pool(pool: Pool) -> None:
    with IndexServer(pool, host=2), Client(pool, host=1) as one, Client(pool, host=3) as other:
        put(IndexClient(one), range(10))
        assert held(IndexClient(other), range(12)) == set(range(10))
        IndexClient(other).remove(keys(range(4)))
        assert held(IndexClient(one), range(12)) == set(range(4, 10))


def test_blocks_survive_a_kill_and_a_restart(pool: Pool, paths: list[Path]) -> None:
    with Process(roles.serve_index, paths) as first, Client(pool) as client:
        index = IndexClient(client)
        put(index, range(20))
        index.remove(keys(range(5)))
        first.kill()
        with Process(roles.serve_index, paths) as second:
            assert held(index, range(20)) == set(range(5, 20))
            put(index, range(30, 40))
            assert second.end() == 0
        with IndexServer(pool):
            assert held(index, range(40)) == {*range(5, 20), *range(30, 40)}
    report = check_pool(pool, payload=True)
    assert (report.finding_count, report.block_count) == (0, 25)


def test_all_space_of_the_data_devices_is_for_blocks(pool: Pool) -> None:
    with IndexServer(pool) as server, Client(pool) as client:
        put(IndexClient(client), range(40))
        cells = server.space_map(15)
        tables, used = cells["table_count"].sum(axis=1), cells["used_bytes"].sum(axis=1)
        own = pool.devices[0].stripe_count - 1
        assert tables.tolist() == [own, 0, 0]
        assert cells["stripe_count"].sum(axis=1).tolist() == [own, 15, 15]
        assert used[0] == 0
        assert min(used[1:]) > 0
        assert server.index_stat().used_bytes == used.sum()


def test_damage_on_the_metadata_device_is_found_and_dropped(pool: Pool) -> None:
    with IndexServer(pool), Client(pool) as client:
        put(IndexClient(client), range(6))
    report = check_pool(pool)
    line = pool.geometry.table_offset
    line += (report.half * pool.geometry.block_count_max + 2) * 64
    with pool.devices[0].path.open("r+b") as file:
        file.seek(STRIPE_SIZE + line + 8)
        file.write(b"\xff" * 8)
    assert check_pool(pool).finding_count > 0
    acts, after = repair_pool(pool)
    assert acts
    assert (after.finding_count, after.block_count) == (0, 5)


def test_the_metadata_device_is_verified_too(pool: Pool) -> None:
    report = verify_pool(pool, seconds=0.2)
    assert {found.device for found in report.findings} == {0, 1, 2}
    assert report.good
    with IndexServer(pool), Client(pool) as client:  # and nothing of the pool was overwritten
        put(IndexClient(client), range(3))
    assert check_pool(pool).finding_count == 0
