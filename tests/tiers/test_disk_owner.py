# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The owner of a disk: a disk outlives pools, and is never taken from a server that uses it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.blocks import eventually
from support.disk_tiers import MIB, is_block, keys_of, payload_of, records_of

from beluga import KVCache, Pool
from beluga.coherence import crc32c
from beluga.errors import TierError
from beluga.index import IndexClient
from beluga.tiers.disk import DiskTier, adopt_disk
from beluga.tiers.disk import file as disk_file
from beluga.tiers.disk.file import NAME_SIZE, Owner, owner_of
from beluga.tiers.settings import TierSettings

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

SIZE = 16 * MIB
LENGTH = 60_000
NAMES = [bytes([number]) * 32 for number in range(5)]
PAGE = 4096


def owned(path: Path, server: str = "", pool: str = "") -> DiskTier:
    return DiskTier(path, SIZE, server=server, pool=pool)


def fill(tier: DiskTier) -> None:
    assert tier.save(records_of(range(5), LENGTH), payload_of(range(5), LENGTH)).all()
    tier.close()


def full(tier: DiskTier) -> bool:
    """Close a tier, and return whether it has the blocks."""
    blocks = tier.load(keys_of(range(5)))
    tier.close()
    return all(block is not None and is_block(block, n) for n, block in enumerate(blocks))


# ---- Who may have a disk


@pytest.mark.parametrize(
    ("before", "after", "may"),
    [
        (("rack", "p1"), ("rack", "p1"), True),
        (("rack", "p1"), ("rack", "p2"), True),  # the pool was recreated
        (("rack", "p1"), ("shelf", "p1"), True),  # the pool was moved
        (("rack", "p1"), ("shelf", "p2"), False),
        (("p1", ""), ("rack", "p1"), True),  # written before disks had owners
        (("p1", ""), ("rack", "p2"), False),
        (("", ""), ("rack", "p1"), True),
        (("rack", "p1"), ("", ""), True),
    ],
)
def test_a_disk_belongs_to_its_owner_with_any_pool(
    tmp_path: Path, before: tuple[str, str], after: tuple[str, str], may: bool
) -> None:
    disk = tmp_path / "disk"
    fill(owned(disk, *before))
    if not may:
        with pytest.raises(
            TierError, match=f"of the server {before[0]};.*beluga disk adopt {disk}"
        ):
            owned(disk, *after)
        after = before
    assert full(owned(disk, *after))


def test_a_disk_of_another_server_is_rejected_with_its_owner(tmp_path: Path, shm: Path) -> None:
    """Before a takeover, ``serve`` checks the owner of the disk, and not only its lock."""
    disk = tmp_path / "disk"
    tier = owned(disk, "rack", "p1")
    with Pool.create([shm / "a"], device_size=24 << 20, sparse=True) as pool:
        with pytest.raises(TierError, match=f"of the server rack;.*beluga disk adopt {disk}"):
            TierSettings(disks=(str(disk),), disk_bytes=SIZE, owner="shelf").check_owner(pool)
        TierSettings(disks=(str(disk),), disk_bytes=SIZE, owner="rack").check_owner(pool)
    tier.close()


def test_the_last_written_owner_is_used(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    for server, pool in (("a", "p1"), ("b", "p1"), ("b", "p2"), ("", ""), ("c", "p2")):
        owned(disk, server, pool).close()
    for server, pool in (("a", "p1"), ("b", "p1")):
        with pytest.raises(TierError, match="of the server c;"):
            owned(disk, server, pool)


def test_a_released_disk_keeps_its_blocks(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    tier = owned(disk, "rack", "p1")
    with pytest.raises(TierError, match="in use by process"):
        adopt_disk(disk)
    fill(tier)
    assert adopt_disk(disk) == Owner("rack", "p1")
    assert adopt_disk(disk / "blocks") == Owner()
    assert full(owned(disk, "shelf", "p2"))
    with pytest.raises(TierError, match="of the server shelf"):
        owned(disk, "rack", "p1")


@pytest.mark.parametrize("what", ["nothing", "folder", "file", "empty"])
def test_a_file_that_is_not_a_disk_tier_is_not_released(tmp_path: Path, what: str) -> None:
    path = tmp_path / "disk"
    if what == "folder":
        path.mkdir()
    elif what != "nothing":
        path.write_bytes(b"notes" if what == "file" else b"")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TierError, match=r"does not exist|not a disk tier|is empty"):
        adopt_disk(path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("cut", range(0, PAGE + 1, 512))
@pytest.mark.parametrize("new_first", [True, False])
def test_a_power_cut_while_the_owner_changes_loses_no_block(
    tmp_path: Path, cut: int, new_first: bool
) -> None:
    disk = tmp_path / "disk"
    fill(owned(disk, "rack", "p1"))
    old = (disk / "blocks").read_bytes()[:PAGE]
    owned(disk, "rack", "p2").close()
    new = (disk / "blocks").read_bytes()[:PAGE]
    assert old != new
    first, second = (new, old) if new_first else (old, new)
    with (disk / "blocks").open("r+b") as file:
        file.write(first[:cut] + second[cut:])
    assert full(owned(disk, "rack", "p3"))


def test_a_header_of_an_earlier_version_has_no_second_checksum(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    fill(owned(disk, "p1"))
    page = bytearray((disk / "blocks").read_bytes()[:PAGE])
    page[508:512] = bytes(4)
    page[-4:] = disk_file._CRC.pack(crc32c(bytes(page[:-4])))
    with (disk / "blocks").open("r+b") as file:
        file.write(page)
    assert full(owned(disk, "rack", "p1"))
    assert full(owned(disk, "rack", "p2"))


@pytest.mark.parametrize("place", [8, 48, 100, 180, 300, 510])
def test_a_damaged_first_sector_is_refused(tmp_path: Path, place: int) -> None:
    disk = tmp_path / "disk"
    fill(owned(disk, "rack", "p1"))
    with (disk / "blocks").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0] ^ 0x40
        file.seek(place)
        file.write(bytes([byte]))
    with pytest.raises(TierError, match=r"is damaged|has version"):
        owned(disk, "rack", "p1")


# ---- What a pool's owner is named


def test_a_pool_is_identified_by_the_path_of_its_first_device(shm: Path) -> None:
    (shm / "link").symlink_to(shm)
    with Pool.create([shm / "a", shm / "b"], device_size=24 << 20, sparse=True) as pool:
        assert owner_of(pool) == Owner(os.path.realpath(shm / "a"), pool.id)
        assert owner_of(pool, "rack") == Owner("rack", pool.id)
        long = owner_of(pool, "ä" * 100).name
        assert len(long.encode()) <= NAME_SIZE
        assert long != owner_of(pool, "ä" * 101).name
    with Pool.open([shm / "link" / "b", shm / "link" / "a"]) as again:
        assert owner_of(again) == Owner(os.path.realpath(shm / "a"), pool.id)


def test_pools_in_slices_of_one_device_have_separate_identities(tmp_path: Path) -> None:
    file, size = tmp_path / "file", 24 << 20
    file.touch()
    os.truncate(file, 2 * size)
    for place in (0, size):
        with Pool.create([f"{file}@{place}+{size}"], sparse=True) as pool:
            assert owner_of(pool).name == os.path.realpath(file) + (f"@{place}" if place else "")


# ---- Servers


@contextmanager
def caching(path: Path) -> Iterator[KVCache]:
    with Pool.open([path]) as pool, KVCache(pool, namespace="test", timeout_s=20) as cache:
        yield cache


def made(path: Path, *, again: bool = False) -> None:
    Pool.create([path], device_size=32 << 20, sparse=True, force=again).close()


def block(number: int) -> np.ndarray:
    return np.full((1, LENGTH), number + 1, np.uint8)


def save(path: Path, disk: Path) -> None:
    """Put blocks, and wait until the disk has them, too."""
    with caching(path) as cache:
        for number, name in enumerate(NAMES):
            assert cache.put([name], block(number)).stored == 1
        index, keys = IndexClient(cache.client), cache.keys(NAMES)
        assert eventually(lambda: set(index.tiers(keys).tolist()) == {0b11})


def has_all(path: Path) -> bool:
    target = np.zeros((1, LENGTH), np.uint8)
    with caching(path) as cache:
        return all(
            cache.get([name], target).hits == 1 and (target == block(number)).all()
            for number, name in enumerate(NAMES)
        )


def below(disk: Path) -> list[object]:
    return ["--disk", disk, "--disk-bytes", "16M", "--admission", "always"]


def printed(server: subprocess.Popen[str], text: str) -> bool:
    assert server.stderr
    return any(text in line for line in server.stderr)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("standby", [False, True])
def test_a_recreated_pool_has_the_blocks_of_its_disk(
    shm: Path, tmp_path: Path, start: Start, how: int, standby: bool
) -> None:
    path, disk = shm / "p", tmp_path / "disk"
    made(path)
    first = start("serve", "--pool", path, *below(disk))
    assert printed(first, "serving, epoch 1")
    save(path, disk)
    first.send_signal(how)
    first.wait(60)
    path.unlink()  # as a reboot does
    made(path)
    options = ["--standby"] if standby else []
    second = start("serve", "--pool", path, *below(disk), *options)
    assert printed(second, "took over, epoch 1" if standby else "serving, epoch 1")
    assert eventually(lambda: has_all(path))


@pytest.mark.parametrize("content", [b"\0", b"\x5a"], ids=["zeros", "garbage"])
def test_a_pool_on_volatile_memory_is_recreated_after_a_reboot(
    shm: Path, tmp_path: Path, start: Start, run: Run, content: bytes
) -> None:
    """A devdax device is still there, but has lost its contents. Each command reports that in one
    line, and the disk tier has the blocks once an operator has created the pool again.
    """
    path, disk = shm / "p", tmp_path / "disk"
    made(path)
    first = start("serve", "--pool", path, *below(disk))
    assert printed(first, "serving, epoch 1")
    save(path, disk)
    first.kill()  # a power cut
    first.wait(60)
    shutil.rmtree(f"{path}.run", ignore_errors=True)  # the runtime directory is in memory, too
    size = path.stat().st_size
    path.write_bytes(content * size)
    for words in (("serve", *below(disk)), ("ping",), ("pool", "info"), ("pool", "check")):
        refused = run(*words, "--pool", path)
        assert refused.returncode == 1
        errors = [line for line in refused.stderr.splitlines() if "error" in line]
        assert len(errors) == 1
        assert "Traceback" not in refused.stderr
    assert run("pool", "create", "--force", path).returncode == 0
    second = start("serve", "--pool", path, *below(disk))
    assert printed(second, "serving, epoch 1")
    assert eventually(lambda: has_all(path))


def test_the_disk_of_another_pool_is_rejected_until_it_is_released(
    shm: Path, tmp_path: Path, start: Start, run: Run
) -> None:
    one, two, disk = shm / "one", shm / "two", tmp_path / "disk"
    made(one)
    made(two)
    first = start("serve", "--pool", one, *below(disk))
    assert printed(first, "serving, epoch 1")
    save(one, disk)
    held = run("disk", "adopt", disk)
    assert held.returncode == 1
    assert "in use by process" in held.stderr
    first.kill()
    first.wait(60)
    refused = run("serve", "--pool", two, *below(disk))
    assert refused.returncode == 1
    [line] = [
        line for line in refused.stderr.splitlines() if "has the blocks of the server" in line
    ]
    assert f"beluga disk adopt {disk}" in line
    given = run("disk", "adopt", disk, "--json")
    assert given.returncode == 0
    assert str(one) in given.stdout
    second = start("serve", "--pool", two, *below(disk))
    assert printed(second, "serving, epoch 1")
    assert eventually(lambda: has_all(two))


def test_an_owner_with_a_name_may_move_its_pool(
    shm: Path, tmp_path: Path, start: Start, run: Run
) -> None:
    one, two, disk = shm / "one", shm / "two", tmp_path / "disk"
    made(one)
    made(two)
    named = [*below(disk), "--disk-owner", "rack 7"]
    first = start("serve", "--pool", one, *named)
    assert printed(first, "serving, epoch 1")
    save(one, disk)
    first.kill()
    first.wait(60)
    second = start("serve", "--pool", two, *named)
    assert printed(second, "serving, epoch 1")
    assert eventually(lambda: has_all(two))
    alone = run("serve", "--pool", one, "--disk-owner", "rack 7")
    assert alone.returncode == 2
    assert "give --disk" in alone.stderr
