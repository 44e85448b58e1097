# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool check finds damage that is planted by hand, and nothing in a healthy or a live pool.
After a repair it finds nothing, and undamaged blocks are still stored.
"""

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import PLANTS, Ground, Plant, seal_table
from support import role
from support.blocks import held, put
from support.emulation import long

from beluga import KVCache
from beluga.errors import DeviceBusyError, EpochDamagedError, NoServerError, ServerAliveError
from beluga.index import IndexClient, IndexServer, chain_names, check_pool, repair_pool
from beluga.index.check import KINDS
from beluga.pool import Pool
from beluga.rpc import Client

COUNT = 24
SHAPES = {
    "one": {"devices": 1},
    "interleaved": {"devices": 2},
    "row": {"devices": 3, "interleave": False, "coherence": "software"},
}


def history(paths: list[str]) -> None:
    """The server of epoch 1 stops; that of epoch 2 and its client are killed in their work."""
    pool = Pool.open(paths)
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


LOOKS = 200
LENGTHS = (9_000, 100_000, 700_000, 2_200_000)

REPAIRED = 20


@pytest.fixture(scope="module", params=SHAPES)
def shaped_paths(request: pytest.FixtureRequest, memory_root: Path) -> Iterator[list[Path]]:
    """The devices of a dead pool with COUNT + 1 committed blocks, written by epoch 2 (half 0)."""
    shape = dict(SHAPES[request.param])
    with tempfile.TemporaryDirectory(prefix="beluga-test-", dir=memory_root) as folder:
        shaped_paths = [Path(folder) / f"device{i}" for i in range(shape.pop("devices"))]
        options: dict[str, Any] = {"sparse": True, "max_blocks": 200, "lane_count": 4, **shape}
        Pool.create(shaped_paths, device_size=(192 << 20) // len(shaped_paths), **options).close()
        ended = role.run(history, shaped_paths)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        yield shaped_paths


@pytest.fixture
def ground(shaped_paths: list[Path]) -> Iterator[Ground]:
    with Pool.open(shaped_paths) as pool:
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


def test_findings_beyond_the_buffer_are_counted(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in range(COUNT):
        ground.flip(ground.entry(block), 8)
    monkeypatch.setattr("beluga.index.check.FINDINGS_MAX", 5)
    report = check_pool(ground.pool)
    assert (report.finding_count, len(report.findings)) == (COUNT, 5)
    assert report.findings[0] == (
        "entry-damaged block 0: the check value of the entry is wrong; it reads as a miss"
    )


@pytest.fixture(params=["hardware", "software"])
def live_pool(request: pytest.FixtureRequest, shm: Path) -> Iterator[Pool]:
    """A small live_pool: blocks are evicted soon, extents open and close."""
    paths = [shm / name for name in "ab"]
    with Pool.create(
        paths,
        device_size=20 << 20,
        sparse=True,
        max_blocks=128,
        lane_count=8,
        coherence=request.param,
    ) as live_pool:
        yield live_pool


def work(live_pool: Pool, seed: int, stop: threading.Event) -> int:
    """Put, get and remove blocks of many sizes in short sessions. Returns the number of rounds."""
    random = np.random.default_rng(seed)
    rounds = 0
    while not stop.is_set():
        try:
            client = Client(live_pool, timeout_s=60)
        except NoServerError:  # one server has stopped, and the next one has not started
            continue
        with client, KVCache(client, namespace="live", timeout_s=60) as cache:
            for _ in range(10):
                names = [bytes([n]) * 16 for n in random.integers(0, 60, 4)]
                names = list(dict.fromkeys(names))
                length = LENGTHS[random.integers(len(LENGTHS))]
                blocks = random.integers(0, 256, (len(names), length), dtype=np.uint8)
                with_room = cache.put(names, blocks)
                cache.get(names, blocks)
                if with_room.refused or random.integers(3) == 0:
                    cache.remove(names)
                rounds += 1
    return rounds


@contextmanager
def load(live_pool: Pool) -> Iterator[None]:
    stop = threading.Event()
    with ThreadPoolExecutor(3) as threads:
        working = [threads.submit(work, live_pool, seed, stop) for seed in range(3)]
        try:
            yield
        finally:
            stop.set()
        assert all(each.result() for each in working)


def test_a_pool_under_load_has_no_findings(live_pool: Pool) -> None:
    findings: list[str] = []
    looks = 0
    with IndexServer(live_pool), load(live_pool):
        while looks < LOOKS:
            report = check_pool(live_pool, payload=looks % 2 == 0)
            findings.extend(report.findings)
            looks += report.block_count > 0
    assert findings == []


def test_a_pool_whose_server_changes_has_no_findings(live_pool: Pool) -> None:
    findings: list[str] = []
    stop = threading.Event()

    def look() -> int:
        looks = 0
        while not stop.is_set():
            findings.extend(check_pool(live_pool, payload=True).findings)
            looks += 1
        return looks

    with ThreadPoolExecutor(1) as thread:
        server = IndexServer(live_pool)
        server.start()
        with load(live_pool):
            looking = thread.submit(look)
            try:
                for _ in range(5):
                    server.stop()
                    server = IndexServer(live_pool)
                    server.start()
                    threading.Event().wait(0.2)
            finally:
                stop.set()
            assert looking.result() > 0
        server.stop()
    assert findings == []
    assert check_pool(live_pool, payload=True).findings == ()


def fill_table(pool: Pool) -> None:
    """Store blocks in two epochs, so that the second one's half, 0, is valid."""
    with IndexServer(pool):
        pass
    with IndexServer(pool), Client(pool) as client:
        put(IndexClient(client), range(REPAIRED))


@pytest.fixture
def table(pool: Pool) -> Ground:
    """The tables of a pool with REPAIRED blocks."""
    fill_table(pool)
    return Ground(pool)


def retained(pool: Pool) -> set[int]:
    with IndexServer(pool), Client(pool) as client:
        return held(IndexClient(client), range(REPAIRED))


def test_a_repair_does_not_change_a_healthy_pool(pool: Pool) -> None:
    fill_table(pool)
    acts, report = repair_pool(pool)
    assert (acts, report.findings) == ((), ())
    assert retained(pool) == set(range(REPAIRED))


def test_damaged_entries_are_dropped(pool: Pool, table: Ground) -> None:
    for block in (3, 7):
        table.flip(table.entry(block), 20)
    acts, report = repair_pool(pool)
    assert len(acts) == 2 and all("entry-damaged" in act for act in acts)
    assert report.findings == ()
    assert len(retained(pool)) == REPAIRED - 2


def test_a_damaged_mark_drops_its_blocks(pool: Pool, table: Ground) -> None:
    table.flip(table.mark(0), 20)
    _, report = repair_pool(pool)
    assert report.findings == ()
    assert 0 < len(retained(pool)) < REPAIRED


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
    pool: Pool, table: Ground, half: int, nonsense: dict[str, Any]
) -> None:
    right = bytes(table.at(table.epoch(half) + 64))
    table.forge_table("bl_epoch_line", table.epoch(half), half, **nonsense)
    _, report = repair_pool(pool, declared_gone=True)
    assert report.findings == ()
    assert [bytes(table.at(table.epoch(half) + at)) for at in (0, 64)] == [right, right]
    assert retained(pool) == set(range(REPAIRED))


@pytest.mark.parametrize(("half", "epoch"), [(0, 0), (0, 1), (1, (1 << 24) + 1)])
def test_an_invalid_epoch_line_drops_nothing_else(
    pool: Pool, table: Ground, half: int, epoch: int
) -> None:
    """The half that served before is checked instead, and its damage has no effect."""
    for copy in (0, 64):
        table.forge_table("bl_epoch_line", table.epoch(half) + copy, half, epoch=epoch)
    history = pool.geometry.block_count_max
    table.at(table.entry(history + 3))[:] = bytes(range(64))
    assert any("entry-damaged block 3" in finding for finding in check_pool(pool).findings)
    acts, report = repair_pool(pool, declared_gone=True)
    assert not any("entry" in act for act in acts)
    assert report.findings == ()
    assert retained(pool) == set(range(REPAIRED))


@pytest.mark.parametrize("half", [0, long(1)])
def test_a_server_refuses_a_damaged_epoch_line_until_it_is_repaired(
    pool: Pool,
    table: Ground,
    paths: list[Path],
    half: int,
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    for copy in (0, 64):  # neither torn nor unwritten: both have arbitrary bytes
        table.at(table.epoch(half) + copy)[:] = bytes((7 * at + copy) % 251 for at in range(64))
    damaged = bytes(table.at(table.epoch(half)))
    names_repair = "'beluga pool check --repair'"
    with (
        pytest.raises(EpochDamagedError, match=names_repair),
        IndexServer(pool, declared_gone=True),
    ):
        pass
    assert bytes(table.at(table.epoch(half))) == damaged
    devices = [option for path in paths for option in ("--pool", path)]
    refused = run("serve", *devices)
    assert refused.returncode == 1
    assert names_repair in refused.stderr
    assert run("pool", "check", *devices).returncode == 1
    assert run("pool", "check", "--repair", *devices).returncode == 0
    assert run("pool", "check", *devices).returncode == 0
    assert retained(pool) == set(range(REPAIRED))


def other_lines(table: Ground) -> list[int]:
    tables = [table.heartbeat(), 4096, 16384, 16384 + 128]
    return [*tables, table.session(0), table.lane(0) + 64]


@pytest.mark.parametrize(
    ("lines", "count", "declared"),
    [
        (lambda table: [table.epoch(0), table.epoch(0) + 64], 1, True),
        (lambda table: [table.epoch(1), table.epoch(1) + 64], 1, True),
        (other_lines, 5, False),
    ],
    ids=["epoch 0", "epoch 1", "others"],
)
def test_damaged_lines_are_recreated_and_cost_no_block(
    pool: Pool, table: Ground, lines: Callable[[Ground], list[int]], count: int, declared: bool
) -> None:
    for offset in lines(table):
        table.flip(offset, 9)
    assert check_pool(pool).finding_count >= count
    _, report = repair_pool(pool, declared_gone=declared)
    assert report.findings == ()
    assert retained(pool) == set(range(REPAIRED))


def test_the_newer_of_two_blocks_with_one_key_is_kept(pool: Pool, table: Ground) -> None:
    older = table.read("bl_entry", table.entry(4))
    table.forge("bl_entry", table.entry(5), 5, seal_table, key=list(older.key))
    acts, report = repair_pool(pool)
    assert ["entry-twice block 4" in act for act in acts] == [True]
    assert report.findings == ()
    assert retained(pool) == set(range(REPAIRED)) - {5}


def test_a_pool_in_use_is_not_changed(pool: Pool, table: Ground) -> None:
    table.flip(table.entry(3), 20)
    before = bytes(table.at(table.entry(3)))
    with IndexServer(pool), pytest.raises(DeviceBusyError):
        repair_pool(pool)
    assert bytes(table.at(table.entry(3))) == before


def test_other_hosts_must_be_declared_gone(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True, coherence="software") as pool:
        fill_table(pool)
        ground = Ground(pool)
        ground.forge("bl_session_line", ground.session(0), 0, seal_table, nonce=9, epoch=2, state=1)
        with pytest.raises(ServerAliveError):
            repair_pool(pool)
        _, report = repair_pool(pool, declared_gone=True)
        assert report.findings == ()
