# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A process that is killed while it writes to a disk tier: afterwards saved blocks are hits,
removed ones are not, and no block has wrong bytes.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import disk_writer
from support.disk_tiers import MIB, is_block, keys_of
from support.emulation import FULL

from beluga.errors import TierError
from beluga.tiers.disk import DiskTier

SIZE = 16 * MIB
KEPT = 100  # the most recent blocks, which cannot be evicted yet


def killed(
    path: Path, io: str, first: int, mixed: bool, chance: random.Random
) -> tuple[list[int], list[int]]:
    """Run a writer and kill it at a random time. Returns the blocks that it had saved and not
    removed, in order, and those that it had removed.
    """
    arguments = [str(path), str(SIZE), io, str(first), str(int(mixed))]
    command = [sys.executable, disk_writer.__file__, *arguments]
    words: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(chance.randrange(1, 25 if mixed else 120)):
            line = writer.stdout.readline()
            words += line.split()
            if line == "\n":
                break
        time.sleep(chance.random() * 0.004)  # any time during a save
        writer.kill()
        words += writer.stdout.read().split()
    leaving = {int(word[1:]) for word in words if word[0] == "~"}
    gone = [int(word[1:]) for word in words if word[0] == "-"]
    saved = [int(word) for word in words if word.isdecimal()]
    return [number for number in saved if number not in leaving], gone


def check(path: Path, saved: list[int], gone: list[int], io: str) -> None:
    tier = DiskTier(path, SIZE, io=io)
    back = [n for n in gone if tier.contains(keys_of([n]))[0]]
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
        saved, gone = killed(path, io, 10_000 * number, mixed, chance)
        check(path, saved if mixed else saved[-KEPT:], gone, io)
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
