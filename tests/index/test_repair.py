# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""After a repair the check finds nothing, and undamaged blocks are still stored."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lines import seal_table
from plants import Ground
from support.blocks import held, put
from support.emulation import long

from beluga.errors import DeviceBusyError, EpochDamagedError, ServerAliveError
from beluga.index import IndexClient, IndexServer, check_pool, repair_pool
from beluga.pool import Pool
from beluga.rpc import Client

COUNT = 20


def fill(pool: Pool) -> None:
    """Store blocks in two epochs, so that the second one's half, 0, is valid."""
    with IndexServer(pool):
        pass
    with IndexServer(pool), Client(pool) as client:
        put(IndexClient(client), range(COUNT))


def kept(pool: Pool) -> set[int]:
    with IndexServer(pool), Client(pool) as client:
        return held(IndexClient(client), range(COUNT))


def test_a_repair_does_not_change_a_healthy_pool(pool: Pool) -> None:
    fill(pool)
    acts, report = repair_pool(pool)
    assert (acts, report.findings) == ((), ())
    assert kept(pool) == set(range(COUNT))


def test_damaged_entries_are_dropped(pool: Pool) -> None:
    fill(pool)
    ground = Ground(pool)
    for block in (3, 7):
        ground.flip(ground.entry(block), 20)
    acts, report = repair_pool(pool)
    assert len(acts) == 2 and all("entry-damaged" in act for act in acts)
    assert report.findings == ()
    assert len(kept(pool)) == COUNT - 2


def test_a_damaged_mark_drops_its_blocks(pool: Pool) -> None:
    fill(pool)
    ground = Ground(pool)
    ground.flip(ground.mark(0), 20)
    _, report = repair_pool(pool)
    assert report.findings == ()
    assert 0 < len(kept(pool)) < COUNT


@pytest.mark.parametrize("half", [0, 1])
def test_a_damaged_epoch_line_is_recreated(pool: Pool, half: int) -> None:
    fill(pool)
    ground = Ground(pool)
    for copy in (0, 64):
        ground.flip(ground.epoch(half) + copy, 3)
    _, report = repair_pool(pool, declared_gone=True)
    assert report.findings == ()
    assert kept(pool) == set(range(COUNT))


NONSENSE: list[dict[str, Any]] = [
    {"epoch": 0},
    {"epoch": 1 << 24},
    {"epoch": (1 << 24) + 1},
    {"nonce": 0},
    {"state": 0},
    {"state": 5},
    {"host": 64},
    {"reserved": [0, 0, 1]},
    {"reserved_tail": 1},
]


@pytest.mark.parametrize(
    ("half", "nonsense"),
    [
        *((half, nonsense) for half in (0, 1) for nonsense in NONSENSE),
        (0, {"epoch": 5}),  # of the other half
        (1, {"epoch": 6}),
    ],
)
def test_the_valid_copy_of_an_epoch_line_is_used(
    pool: Pool, half: int, nonsense: dict[str, Any]
) -> None:
    fill(pool)
    ground = Ground(pool)
    right = bytes(ground.at(ground.epoch(half) + 64))
    ground.forge_table("bl_epoch_line", ground.epoch(half), half, **nonsense)
    _, report = repair_pool(pool, declared_gone=True)
    assert report.findings == ()
    assert [bytes(ground.at(ground.epoch(half) + at)) for at in (0, 64)] == [right, right]
    assert kept(pool) == set(range(COUNT))


@pytest.mark.parametrize(("half", "epoch"), [(0, 0), (0, 1), (1, (1 << 24) + 1)])
def test_an_invalid_epoch_line_drops_nothing_else(pool: Pool, half: int, epoch: int) -> None:
    """The half that served before is checked instead, and its damage has no effect."""
    fill(pool)
    ground = Ground(pool)
    for copy in (0, 64):
        ground.forge_table("bl_epoch_line", ground.epoch(half) + copy, half, epoch=epoch)
    history = pool.geometry.block_count_max
    ground.at(ground.entry(history + 3))[:] = bytes(range(64))
    assert any("entry-damaged block 3" in finding for finding in check_pool(pool).findings)
    acts, report = repair_pool(pool, declared_gone=True)
    assert not any("entry" in act for act in acts)
    assert report.findings == ()
    assert kept(pool) == set(range(COUNT))


@pytest.mark.parametrize("half", [0, long(1)])
def test_a_server_refuses_a_damaged_epoch_line_until_it_is_repaired(
    pool: Pool,
    paths: list[Path],
    half: int,
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    fill(pool)
    ground = Ground(pool)
    for copy in (0, 64):  # neither torn nor unwritten: both have arbitrary bytes
        ground.at(ground.epoch(half) + copy)[:] = bytes((7 * at + copy) % 251 for at in range(64))
    damaged = bytes(ground.at(ground.epoch(half)))
    names_repair = "'beluga pool check --repair'"
    with (
        pytest.raises(EpochDamagedError, match=names_repair),
        IndexServer(pool, declared_gone=True),
    ):
        pass
    assert bytes(ground.at(ground.epoch(half))) == damaged
    devices = [option for path in paths for option in ("--pool", path)]
    refused = run("serve", *devices)
    assert refused.returncode == 1
    assert names_repair in refused.stderr
    assert run("pool", "check", *devices).returncode == 1
    assert run("pool", "check", "--repair", *devices).returncode == 0
    assert run("pool", "check", *devices).returncode == 0
    assert kept(pool) == set(range(COUNT))


def test_lines_of_all_kinds_are_dropped(pool: Pool) -> None:
    fill(pool)
    ground = Ground(pool)
    for offset in (
        ground.heartbeat(),
        4096,
        16384,
        16384 + 128,
        ground.session(0),
        ground.lane(0) + 64,
    ):
        ground.flip(offset, 9)
    assert check_pool(pool).finding_count >= 5
    _, report = repair_pool(pool)
    assert report.findings == ()
    assert kept(pool) == set(range(COUNT))


def test_the_newer_of_two_blocks_with_one_key_is_kept(pool: Pool) -> None:
    fill(pool)
    ground = Ground(pool)
    older = ground.read("bl_entry", ground.entry(4))
    ground.forge("bl_entry", ground.entry(5), 5, seal_table, key=list(older.key))
    acts, report = repair_pool(pool)
    assert ["entry-twice block 4" in act for act in acts] == [True]
    assert report.findings == ()
    assert kept(pool) == set(range(COUNT)) - {5}


def test_a_pool_in_use_is_not_changed(pool: Pool) -> None:
    fill(pool)
    ground = Ground(pool)
    ground.flip(ground.entry(3), 20)
    before = bytes(ground.at(ground.entry(3)))
    with IndexServer(pool), pytest.raises(DeviceBusyError):
        repair_pool(pool)
    assert bytes(ground.at(ground.entry(3))) == before


def test_other_hosts_must_be_declared_gone(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True, coherence="software") as pool:
        fill(pool)
        ground = Ground(pool)
        ground.forge("bl_session_line", ground.session(0), 0, seal_table, nonce=9, epoch=2, state=1)
        with pytest.raises(ServerAliveError):
            repair_pool(pool)
        _, report = repair_pool(pool, declared_gone=True)
        assert report.findings == ()
