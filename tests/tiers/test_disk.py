# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The disk tier while the disk works: round trips, eviction, restarts, many threads. A process that
is killed while it writes: afterwards saved blocks are hits, removed ones are not, and no block has
wrong bytes.
"""

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from support import role
from support.disk_tiers import MIB, is_block, keys_of, payload_of, records_of
from support.emulation import FULL
from support.role import Process

from beluga.errors import TierError
from beluga.metrics import REGISTRY
from beluga.tiers.disk import DiskTier

SIZE = 32 * MIB

BATCH = 4
LENGTHS = (60_000, 9_000, 261_000)  # their extents are single stripes, so all blocks fit

KILLED_SIZE = 16 * MIB
RECENT = 100  # the most recent blocks, which cannot be evicted yet


@pytest.fixture(params=["uring", "threads"])
def io(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "uring":
        try:
            DiskTier(tmp_path / "probe", 4 * MIB, io="uring").close()
        except TierError as error:
            pytest.skip(f"no io_uring: {error}")
    return str(request.param)


@pytest.fixture
def tier(io: str, tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "disk", SIZE, io=io)
    yield tier
    tier.close()


def save(tier: DiskTier, numbers: range, length: int) -> np.ndarray:
    return tier.save(records_of(numbers, length), payload_of(numbers, length))


def holds(tier: DiskTier, numbers: Sequence[int]) -> bool:
    """Return whether all these blocks are hits with their bytes."""
    return all(is_block(b, n) for n, b in zip(numbers, tier.load(keys_of(numbers)), strict=True))


def in_threads(*works: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("length", [1, 4095, 4096, 16384, 100_000, MIB, 2_621_440, 5 * MIB])
def test_saved_blocks_are_loaded(tier: DiskTier, length: int) -> None:
    numbers = range(4)
    assert save(tier, numbers, length).all()
    blocks = tier.load(keys_of([*numbers, 99]))
    assert [is_block(block, number) for number, block in enumerate(blocks)] == [True] * 4 + [False]
    first = blocks[0]
    assert first is not None
    assert first.record["fingerprint"] == 7
    assert first.record["chunk_size"] == 16384
    assert tier.contains(keys_of([3, 99])).tolist() == [True, False]


def test_rows_may_be_longer_than_blocks(tier: DiskTier) -> None:
    payload = np.zeros((2, 9000), np.uint8)
    payload[:, :5000] = payload_of(range(2), 5000)
    assert tier.save(records_of(range(2), 5000), payload).all()
    assert holds(tier, range(2))


def test_a_block_twice_in_a_call_is_written_once(tier: DiskTier) -> None:
    twice = [5, 5, 6]
    assert tier.save(records_of(twice, 8192), payload_of(twice, 8192)).all()
    assert tier.stat()["blocks"] == 2
    assert save(tier, range(5, 7), 8192).all()
    assert tier.stat()["blocks"] == 2


def test_the_coldest_are_evicted_and_the_file_stays_bounded(tier: DiskTier, tmp_path: Path) -> None:
    assert save(tier, range(20), MIB).all()
    tier.load(keys_of([0]))
    for first in range(20, 60, 4):
        assert save(tier, range(first, first + 4), MIB).all()
        tier.load(keys_of([0]))
    there = tier.contains(keys_of(range(60)))
    assert there[0]
    assert not there[1:20].any()
    assert there[40:].all()
    assert holds(tier, range(40, 60))
    stat = (tmp_path / "disk/blocks").stat()
    assert stat.st_size <= SIZE
    assert stat.st_blocks * 512 <= SIZE


def test_s3fifo_keeps_read_blocks_and_survives_restarts(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "disk", SIZE, eviction="s3fifo")
    save(tier, range(2), MIB)
    for first in range(10, 80, 5):
        for _ in range(3):
            assert all(block is not None for block in tier.load(keys_of(range(2))))
        save(tier, range(first, first + 5), MIB)
    blocks = tier.stat()["blocks"]
    tier.close()
    tier = DiskTier(tmp_path / "disk", SIZE, eviction="s3fifo")
    assert tier.stat()["blocks"] == blocks == 30
    assert save(tier, range(100, 105), MIB).all()
    assert holds(tier, range(100, 105))
    tier.close()


def test_nothing_is_evicted_while_there_are_free_stripes(tier: DiskTier) -> None:
    """A small tier has few cells of a class, and blocks of another class may be in all of them."""
    save(tier, range(1), 16384)
    for number in range(10, 30):
        assert save(tier, range(number, number + 1), 300_000).all()
    assert tier.contains(keys_of([0, *range(10, 30)])).all()
    assert tier.stat()["evicted"] == 0


def test_space_is_reused_for_another_block_size(tier: DiskTier) -> None:
    for length in (16384, 3 * MIB, 40_000, 2_621_440, MIB):
        numbers = range(length, length + 3 * SIZE // (2 * length))
        step = min(32, 8 * MIB // length)
        for first in range(numbers.start, numbers.stop, step):
            few = range(first, min(first + step, numbers.stop))
            assert save(tier, few, length).any()
        last = numbers[-2:]
        assert holds(tier, last)


def test_a_restart_finds_everything(io: str, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "disk", SIZE, io=io)
    assert save(tier, range(100), 16384).all()
    assert save(tier, range(200, 206), 2_621_440).all()
    assert tier.remove(keys_of([3, 200])) == 2
    tier.close()
    again = DiskTier(tmp_path / "disk", SIZE, io=io)
    assert again.contains(keys_of([3, 200])).tolist() == [False, False]
    numbers = [n for n in [*range(100), *range(201, 206)] if n != 3]
    assert holds(again, numbers)
    assert again.stat()["damaged"] == 0
    again.close()


@pytest.mark.parametrize("removed", [0, 20])
def test_eviction_continues_in_the_old_order_after_a_restart(tmp_path: Path, removed: int) -> None:
    """Removed blocks leave gaps in the order of the others; where they are wide, it is sorted."""
    tier = DiskTier(tmp_path / "disk", SIZE)
    others = range(100, 100 + removed)
    for number in range(15):
        assert save(tier, others, 1).all()
        assert tier.remove(keys_of(others)) == removed
        assert save(tier, range(number, number + 1), 2 * MIB).all()
    tier.close()
    again = DiskTier(tmp_path / "disk", SIZE)
    assert save(again, range(50, 54), 2 * MIB).all()
    assert again.contains(keys_of(range(15))).tolist() == [False] * 4 + [True] * 11
    again.close()


def test_blocks_outlive_the_tier_and_eviction(tier: DiskTier) -> None:
    save(tier, range(4), MIB)
    blocks = tier.load(keys_of(range(4)))
    for first in range(100, 180, 8):
        save(tier, range(first, first + 8), MIB)
        tier.load(keys_of(range(first, first + 8)))
    tier.close()
    gc.collect()
    assert all(is_block(block, number) for number, block in enumerate(blocks))


def test_many_threads_save_and_load(tier: DiskTier) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(12):
            numbers = random.integers(0, 60, 6).tolist()
            length = [16384, 300_000][numbers[0] % 2]
            mine = [n * 2 + (length > 16384) for n in numbers]
            saved = tier.save(records_of(mine, length), payload_of(mine, length))
            wrong.extend(n for n, ok in zip(mine, saved.tolist(), strict=True) if not ok)
            blocks = tier.load(keys_of(mine))
            wrong.extend(
                n for n, b in zip(mine, blocks, strict=True) if b is not None and not is_block(b, n)
            )

    in_threads(*(partial(work, seed) for seed in range(6)))
    assert wrong == []


def test_the_tier_lists_its_keys_and_reports_evictions(tier: DiskTier) -> None:
    lost: set[int] = set()
    tier.on_lost(lambda keys: lost.update(keys[:, 0].tolist()))
    for number in range(0, 40, 4):
        save(tier, range(number, number + 4), 2 * MIB)
    there = set(tier.keys()[:, 0].tolist())
    assert len(there) == 15
    assert there | lost == set(range(40))
    assert not there & lost
    assert len(there) <= tier.block_count_max <= SIZE // 16384


def test_bytes_written_and_read_are_counted(tier: DiskTier) -> None:
    def counted(name: str) -> float:
        sample = REGISTRY.snapshot()[name].series.get((("tier", tier.name),), 0.0)
        assert isinstance(sample, float | int)
        return sample

    before = {
        name: counted(f"beluga_tier_{name}_total")
        for name in ("saved_bytes", "written_bytes", "loaded_bytes", "missed_blocks")
    }
    save(tier, range(4), 10_000)
    tier.load(keys_of([0, 1, 77]))
    now = {name: counted(f"beluga_tier_{name}_total") - had for name, had in before.items()}
    assert now["saved_bytes"] == 40_000
    assert now["loaded_bytes"] == 20_000
    assert now["missed_blocks"] == 1
    assert 4 * 12288 + 4096 <= now["written_bytes"] <= 4 * 12288 + 8192
    assert REGISTRY.snapshot()["beluga_tier_blocks"].series[(("tier", tier.name),)] == 4


def test_a_closed_tier_has_no_blocks(tier: DiskTier) -> None:
    save(tier, range(2), 4096)
    tier.close()
    tier.close()
    assert tier.load(keys_of(range(2))) == [None, None]
    assert not save(tier, range(2), 4096).any()
    assert tier.remove(keys_of(range(2))) == 0


def test_misuse_raises_a_tier_error(tier: DiskTier) -> None:
    for shape, kind, message in (
        ((3, 100), np.uint8, "rows of payload"),
        ((2, 99), np.uint8, "has 100 bytes"),
        ((2, 100), np.uint16, "uint8"),
    ):
        with pytest.raises(TierError, match=message):
            tier.save(records_of(range(2), 100), np.zeros(shape, kind))
    with pytest.raises(TierError, match="keys"):
        tier.load(np.zeros(4, np.uint64))


def length_of(number: int, mixed: bool) -> int:
    return LENGTHS[number // BATCH % 3] if mixed else LENGTHS[0]


def writer(path: str, size: int, io: str, first: int, mixed: bool) -> None:
    """Save blocks to a disk tier until it is killed, and print the numbers of each call's blocks.

    With ``mixed``, blocks have several lengths, and no more are saved than fit. After some calls it
    removes two blocks: it prints ``~N`` before the removal of block N, and ``-N`` when the tier has
    dropped it.
    """
    tier = DiskTier(path, size, io=io)
    batches = count(first, BATCH)
    limit = first + BATCH * 20 if mixed else 1 << 60

    def report(words: list[str]) -> None:
        if words:
            os.write(1, (" ".join(words) + "\n").encode())

    def work() -> None:
        while (start := next(batches)) < limit:
            numbers = range(start, start + BATCH)
            length = length_of(start, mixed)
            saved = tier.save(records_of(numbers, length), payload_of(numbers, length))
            done = [n for n, ok in zip(numbers, saved.tolist(), strict=True) if ok]
            report([str(n) for n in done])
            if start // BATCH % 3 == 0:
                removed = done[:2]
                report([f"~{n}" for n in removed])
                if removed and tier.remove_durably(keys_of(removed)).all():
                    report([f"-{n}" for n in removed])

    role.reply("ready")
    in_threads(work, work, work)
    report(["end"])
    threading.Event().wait()


def killed(
    path: Path, io: str, first: int, mixed: bool, chance: random.Random
) -> tuple[list[int], list[int]]:
    """Run a writer and kill it at a random time. Returns the blocks that it had saved and not
    removed, in order, and those that it had removed.
    """
    words: list[str] = []
    with Process(writer, path, KILLED_SIZE, io, first, mixed) as child:
        for _ in range(chance.randrange(1, 25 if mixed else 120)):
            words += child.receive().split()
            if words[-1:] == ["end"]:
                break
        time.sleep(chance.random() * 0.004)  # any time during a save
        child.signal(signal.SIGKILL)
        while line := child.receive():
            words += line.split()
    leaving = {int(word[1:]) for word in words if word[0] == "~"}
    removed = [int(word[1:]) for word in words if word[0] == "-"]
    saved = [int(word) for word in words if word.isdecimal()]
    return [number for number in saved if number not in leaving], removed


def check(path: Path, saved: list[int], removed: list[int], io: str) -> None:
    tier = DiskTier(path, KILLED_SIZE, io=io)
    back = [n for n in removed if tier.contains(keys_of([n]))[0]]
    missing = [n for n in saved if not is_block(tier.load(keys_of([n]))[0], n)]
    wrong = [
        n
        for n in tier.keys()[:, 0].tolist()
        if (block := tier.load(keys_of([n]))[0]) is not None and not is_block(block, n)
    ]
    tier.close()
    assert (missing, wrong, back) == ([], [], [])


def kill_often(tmp_path: Path, io: str, rounds: int) -> None:
    chance = random.Random(rounds)
    for number in range(rounds):
        mixed = number % 3 == 2
        path = tmp_path / (f"mixed{number}" if mixed else f"one{number // 30}")
        saved, removed = killed(path, io, 10_000 * number, mixed, chance)
        check(path, saved if mixed else saved[-RECENT:], removed, io)
        if mixed:
            (path / "blocks").unlink()


def test_blocks_survive_a_kill_during_writes(tmp_path: Path) -> None:
    kill_often(tmp_path, "auto", 15 if FULL else 6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("io", ["uring", "threads"])
def test_blocks_survive_500_kills_during_writes(tmp_path: Path, io: str) -> None:
    try:
        DiskTier(tmp_path / "probe", 4 * MIB, io=io).close()
    except TierError as error:
        pytest.skip(str(error))
    kill_often(tmp_path, io, 250)
