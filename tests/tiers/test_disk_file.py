# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Opening the file of a disk tier: when it is formatted or rejected, other sizes, whose blocks it
has, and removals that reach a disk which another server, pool or set had.
"""

import hashlib
import logging
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.blocks import eventually
from support.commands import captured
from support.disk_tiers import MIB, is_block, keys_of, payload_of, records_of

from beluga import IndexServer, KVCache, Pool
from beluga.coherence import crc32c
from beluga.errors import TierError
from beluga.index import IndexClient
from beluga.tiers import TierService, TierSettings
from beluga.tiers.disk import DiskTier, SpreadTier, adopt_disk, file
from beluga.tiers.disk import file as disk_file
from beluga.tiers.disk.file import NAME_SIZE, Owner, owner_of

SIZE = 16 * MIB
LENGTH = 60_000  # extents of one stripe, so that those before an end stay whole
NUMBERS = range(150)


def opened(path: Path, size: int = SIZE) -> closing[DiskTier]:
    return closing(DiskTier(path, size))


def fill(tier: DiskTier | SpreadTier) -> None:
    assert tier.save(records_of(NUMBERS, LENGTH), payload_of(NUMBERS, LENGTH)).all()


def stored(tier: DiskTier | SpreadTier) -> list[int]:
    """Return the stored blocks. None may have wrong bytes."""
    blocks = tier.load(keys_of(NUMBERS))
    there = [n for n, block in zip(NUMBERS, blocks, strict=True) if block is not None]
    assert all(is_block(blocks[n], n) for n in there)
    return there


# ---- What is formatted


@pytest.mark.parametrize("where", ["file", "folder"])
@pytest.mark.parametrize(
    "data",
    [b"notes\n" * 60, bytes(4096) + b"a disk image" * 4000, bytes(8192), b"x", bytes(100)],
    ids=["text", "zeros-first", "zeros", "one-byte", "few-zeros"],
)
def test_a_file_with_data_is_refused_and_left_as_it_is(
    tmp_path: Path, where: str, data: bytes
) -> None:
    path = tmp_path / "mine"
    file = path
    if where == "folder":
        path.mkdir()
        file = path / "blocks"
    file.write_bytes(data)
    with pytest.raises(TierError, match=r"is not a disk tier; give another path$"):
        DiskTier(path, SIZE)
    assert file.read_bytes() == data


def test_a_path_that_is_not_a_file_is_rejected() -> None:
    with pytest.raises(TierError, match="not a folder, file or block device; give one"):
        DiskTier("/dev/null", SIZE)


class Died(Exception):  # noqa: N818  it is no error of the program
    """The process dies here."""


@pytest.mark.parametrize("when", range(1, 9))
def test_an_interrupted_format_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    calls = 0

    def dying(real: object) -> object:
        def call(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls == when:
                raise Died
            assert callable(real)
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in ("pwritev", "ftruncate", "fsync"):
            patch.setattr(disk_file.os, name, dying(getattr(os, name)))
        try:
            DiskTier(tmp_path / "disk", SIZE).close()
        except Died:
            pass
        else:
            assert calls < when
    with opened(tmp_path / "disk") as tier:
        fill(tier)
    with opened(tmp_path / "disk") as tier:
        assert stored(tier) == list(NUMBERS)


@pytest.mark.parametrize("sectors", range(1, 8))
@pytest.mark.parametrize("first", [True, False])
def test_a_header_torn_by_a_power_cut_is_recreated(
    tmp_path: Path, sectors: int, first: bool
) -> None:
    DiskTier(tmp_path / "disk", SIZE).close()
    file = tmp_path / "disk/blocks"
    ready = file.read_bytes()[:4096]
    layout = disk_file.plan_layout(SIZE, 16384, "")
    made = disk_file._HEADER.unpack_from(ready)
    layout = disk_file.replace(layout, id=made[3], disk_set=made[-2], disk_count=made[-1])
    half = disk_file._header_of(layout, disk_file._FORMATTING)
    assert disk_file._header_of(layout, disk_file._MAGIC) == ready
    cut = 512 * sectors
    torn = ready[:cut] + half[cut:] if first else half[:cut] + ready[cut:]
    with file.open("r+b") as blocks:
        blocks.write(torn)
    DiskTier(tmp_path / "disk", SIZE).close()
    assert file.read_bytes()[:8] == b"BELUGADT"


# ---- Block devices


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """Return a loop device over a file of zeros."""
    losetup = shutil.which("losetup")
    if losetup is None:
        pytest.skip("there is no losetup")
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 64 * MIB)
    command = [losetup, "--find", "--show", str(image)]
    done = captured(command)
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    path = Path(done.stdout.strip())
    try:
        if not path.is_block_device():
            pytest.skip(f"there is no {path}")
        yield path
    finally:
        subprocess.run([losetup, "--detach", str(path)], check=True)


def test_a_blank_device_works_like_a_file(device: Path) -> None:
    with opened(device, 32 * MIB) as tier:
        fill(tier)
        with pytest.raises(TierError, match="in use by process"):
            DiskTier(device, 32 * MIB)
    for size in (32 * MIB, 64 * MIB):
        with opened(device, size) as tier:
            assert stored(tier) == list(NUMBERS)
    with pytest.raises(TierError, match="give at most its size"):
        DiskTier(device, 128 * MIB)


@pytest.mark.parametrize("offset", [0, 1024, 4096, 65536 + 64, MIB - 4096])
def test_a_device_with_data_in_its_first_mib_is_refused(device: Path, offset: int) -> None:
    fd = os.open(device, os.O_RDWR)
    os.pwrite(fd, b"_BHRfS_M", offset)
    os.fsync(fd)
    with pytest.raises(TierError, match=r"not a disk tier; .*dd if=/dev/zero of=/dev/loop"):
        DiskTier(device, 32 * MIB)
    assert os.pread(fd, 8, offset) == b"_BHRfS_M"
    os.close(fd)


def test_a_device_that_is_in_use_is_refused(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "_CLAIM_S", 0.1)
    mounted = os.open(device, os.O_RDONLY | os.O_EXCL)  # a mount claims a device the same way
    with pytest.raises(TierError, match="in use by the system: mounted"):
        DiskTier(device, 32 * MIB)
    os.close(mounted)
    with opened(device, 32 * MIB), pytest.raises(OSError, match="busy"):
        os.open(device, os.O_RDONLY | os.O_EXCL)


# ---- Sizes


def test_without_room_no_file_is_left_behind(tmp_path: Path) -> None:
    with pytest.raises(
        TierError, match=r"bytes free, but \d+ are needed; give at most \d+ bytes, or"
    ):
        DiskTier(tmp_path / "disk", 1 << 60)
    with pytest.raises(TierError, match="is too small"):
        DiskTier(tmp_path / "disk", MIB)
    assert not list((tmp_path / "disk").iterdir())
    DiskTier(tmp_path / "disk", SIZE).close()


def test_a_tier_that_grows_keeps_its_blocks_and_has_more_space(tmp_path: Path) -> None:
    with opened(tmp_path / "disk") as tier:
        fill(tier)
        before = tier.stat()
    for _ in range(2):
        with opened(tmp_path / "disk", 3 * SIZE) as tier:
            assert stored(tier) == list(NUMBERS)
            assert tier.stat()["data_bytes"] >= before["data_bytes"] + 2 * SIZE
            large = range(1000, 1015)
            assert tier.save(records_of(large, 2 * MIB), payload_of(large, 2 * MIB)).all()
            assert stored(tier) == list(NUMBERS)
    assert (tmp_path / "disk/blocks").stat().st_size <= 3 * SIZE


def test_a_tier_that_shrinks_keeps_the_blocks_that_fit(tmp_path: Path) -> None:
    few = range(60)
    with opened(tmp_path / "disk") as tier:
        fill(tier)
    with opened(tmp_path / "disk", SIZE // 8 * 3) as tier:
        remaining = stored(tier)
        assert 10 < len(remaining) < len(NUMBERS)
        assert tier.stat()["blocks"] == len(remaining)
        assert (tmp_path / "disk/blocks").stat().st_size <= SIZE // 8 * 3
        assert tier.save(records_of(few, LENGTH), payload_of(few, LENGTH)).all()
        assert set(few) <= set(stored(tier))
    with opened(tmp_path / "disk") as tier:  # blocks beyond the former end are not found again
        assert set(few) <= set(stored(tier))
        fill(tier)
        assert stored(tier) == list(NUMBERS)


def test_blocks_that_a_shrunken_tier_lost_are_misses_if_it_grows_at_once(tmp_path: Path) -> None:
    """The entries of lost blocks are still in the file, because nothing was saved in between."""
    with opened(tmp_path / "disk") as tier:
        fill(tier)
    with opened(tmp_path / "disk", SIZE // 8 * 3) as tier:
        remaining = stored(tier)
    with opened(tmp_path / "disk") as tier:
        assert stored(tier) == remaining
        assert np.flatnonzero(tier.contains(keys_of(NUMBERS))).tolist() == remaining


def test_a_size_beyond_the_free_space_is_rejected_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "disk") as tier:
        fill(tier)
    with pytest.raises(TierError, match="its index takes 65536; give at least 2162688 bytes"):
        DiskTier(tmp_path / "disk", MIB)
    with pytest.raises(TierError, match=r"bytes free beside the \d+ that the tier has, but"):
        DiskTier(tmp_path / "disk", 1 << 60)
    full = SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(disk_file.os, "statvfs", lambda path: full)
    with pytest.raises(TierError, match="0 bytes free beside"):
        DiskTier(tmp_path / "disk", 2 * SIZE)
    with opened(tmp_path / "disk") as tier:  # the file has the required size
        assert stored(tier) == list(NUMBERS)


def test_an_index_that_is_small_for_a_new_size_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DiskTier(tmp_path / "disk", SIZE).close()
    with caplog.at_level(logging.WARNING):
        DiskTier(tmp_path / "disk", SIZE, smallest_block=4096).close()
        assert not caplog.records
        DiskTier(tmp_path / "disk", 2 * SIZE).close()
    assert "has an index for 896 blocks, as it was made with 16777216 bytes" in caplog.text


def test_one_more_disk_keeps_the_blocks_of_the_others(tmp_path: Path) -> None:
    def disks(count: int) -> SpreadTier:
        return SpreadTier([DiskTier(tmp_path / f"{i}", 48 * MIB // count) for i in range(count)])

    with closing(disks(2)) as tier:
        fill(tier)
    for count in (3, 2):
        with closing(disks(count)) as tier:
            assert stored(tier) == list(NUMBERS)


# ---- Files of earlier servers


ENTRY = struct.Struct("<16sQQIIIHHI8xI")  # csrc/disk/entry.h


def as_extents(file: Path) -> int:
    """Rewrite the index in the format before November 2026: each entry with its extent of blocks of
    one size, and its index in the extent. Returns the number of entries.
    """
    whole = bytearray(file.read_bytes())
    (ident,) = struct.unpack_from("<Q", whole, 16)
    (slots,) = struct.unpack_from("<I", whole, 12)
    block = -(-LENGTH // disk_file.PAGE) * disk_file.PAGE
    count = 0
    for slot in range(slots):
        at = disk_file.PAGE + slot * ENTRY.size
        *head, stripe, extent_stripes, position, crc, _ = ENTRY.unpack_from(whole, at)
        if head[2] == 0:  # sequence 0: no entry
            continue
        assert extent_stripes == 0
        index, remainder = divmod(stripe * 2 * MIB + position * disk_file.PAGE, block)
        assert remainder == 0
        entry = ENTRY.pack(*head, 0, 5, index, crc, 0)
        check = crc32c(entry[:-4], crc32c(struct.pack("<QQ", ident, slot)))
        whole[at : at + ENTRY.size] = entry[:-4] + struct.pack("<I", check)
        count += 1
    file.write_bytes(whole)
    return count


def test_blocks_that_an_earlier_server_wrote_are_found(tmp_path: Path) -> None:
    with opened(tmp_path / "disk") as tier:
        fill(tier)
    assert as_extents(tmp_path / "disk" / "blocks") == len(NUMBERS)
    more = range(1000, 1020)
    with opened(tmp_path / "disk") as tier:
        assert stored(tier) == list(NUMBERS)
        assert tier.save(records_of(more, 2 * LENGTH), payload_of(more, 2 * LENGTH)).all()
    with opened(tmp_path / "disk") as tier:
        assert stored(tier) == list(NUMBERS)
        assert all(map(is_block, tier.load(keys_of(more)), more))


Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


NAMES = [bytes([number]) * 32 for number in range(5)]
PAGE = 4096

SET_LENGTH = 100_000
LONG_S = 60.0
SET_SIZE = 16 << 20


def owned(path: Path, server: str = "", pool: str = "") -> DiskTier:
    return DiskTier(path, SIZE, server=server, pool=pool)


def fill_few(tier: DiskTier) -> None:
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
    fill_few(owned(disk, *before))
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
    fill_few(tier)
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
    fill_few(owned(disk, "rack", "p1"))
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
    fill_few(owned(disk, "p1"))
    page = bytearray((disk / "blocks").read_bytes()[:PAGE])
    page[508:512] = bytes(4)
    page[-4:] = disk_file._CRC.pack(crc32c(bytes(page[:-4])))
    with (disk / "blocks").open("r+b") as file:
        file.write(page)
    assert full(owned(disk, "rack", "p1"))
    assert full(owned(disk, "rack", "p2"))


@pytest.mark.parametrize("offset", [8, 48, 100, 180, 300, 510])
def test_a_damaged_first_sector_is_refused(tmp_path: Path, offset: int) -> None:
    disk = tmp_path / "disk"
    fill_few(owned(disk, "rack", "p1"))
    with (disk / "blocks").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0] ^ 0x40
        file.seek(offset)
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
    for offset in (0, size):
        with Pool.create([f"{file}@{offset}+{size}"], sparse=True) as pool:
            assert owner_of(pool).name == os.path.realpath(file) + (f"@{offset}" if offset else "")


# ---- Servers


@contextmanager
def caching(path: Path) -> Iterator[KVCache]:
    with Pool.open([path]) as pool, KVCache(pool, namespace="test", timeout_s=20) as cache:
        yield cache


def made(path: Path) -> Path:
    Pool.create([path], device_size=32 << 20, sparse=True).close()
    return path


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


@pytest.fixture
def serve(start: Start) -> Start:
    """Start a server, and wait for the line that it prints."""

    def serve(
        pool: Path, *options: object, prints: str = "serving, epoch 1"
    ) -> subprocess.Popen[str]:
        server = start("serve", "--pool", pool, *options)
        assert server.stderr
        assert any(prints in line for line in server.stderr)
        return server

    return serve


def kill(server: subprocess.Popen[str], how: int = signal.SIGKILL) -> None:
    server.send_signal(how)
    server.wait(60)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("standby", [False, True])
def test_a_recreated_pool_has_the_blocks_of_its_disk(
    shm: Path, tmp_path: Path, serve: Start, how: int, standby: bool
) -> None:
    path, disk = made(shm / "p"), tmp_path / "disk"
    first = serve(path, *below(disk))
    save(path, disk)
    kill(first, how)
    path.unlink()  # as a reboot does
    made(path)
    if standby:
        serve(path, *below(disk), "--standby", prints="took over, epoch 1")
    else:
        serve(path, *below(disk))
    assert eventually(lambda: has_all(path))


@pytest.mark.parametrize("content", [b"\0", b"\x5a"], ids=["zeros", "garbage"])
def test_a_pool_on_volatile_memory_is_recreated_after_a_reboot(
    shm: Path, tmp_path: Path, serve: Start, run: Run, content: bytes
) -> None:
    """A devdax device is still there, but has lost its contents. Each command reports that in one
    line, and the disk tier has the blocks once an operator has created the pool again.
    """
    path, disk = made(shm / "p"), tmp_path / "disk"
    first = serve(path, *below(disk))
    save(path, disk)
    kill(first)  # a power cut
    shutil.rmtree(f"{path}.run", ignore_errors=True)  # the runtime directory is in memory, too
    size = path.stat().st_size
    path.write_bytes(content * size)
    for words in (("serve", *below(disk)), ("ping",), ("pool", "info"), ("pool", "check")):
        refused = run(*words, "--pool", path)
        assert refused.returncode == 2
        errors = [line for line in refused.stderr.splitlines() if "error" in line]
        assert len(errors) == 1
        assert "Traceback" not in refused.stderr
    assert run("pool", "create", "--force", path).returncode == 0
    serve(path, *below(disk))
    assert eventually(lambda: has_all(path))


def test_the_disk_of_another_pool_is_rejected_until_it_is_released(
    shm: Path, tmp_path: Path, serve: Start, run: Run
) -> None:
    first_pool, second_pool, disk = made(shm / "one"), made(shm / "two"), tmp_path / "disk"
    first = serve(first_pool, *below(disk))
    save(first_pool, disk)
    held = run("disk", "adopt", disk)
    assert held.returncode == 1
    assert "in use by process" in held.stderr
    kill(first)
    refused = run("serve", "--pool", second_pool, *below(disk))
    assert refused.returncode == 1
    lines = refused.stderr.splitlines()
    (line,) = (line for line in lines if "has the blocks of the server" in line)
    assert f"beluga disk adopt {disk}" in line
    given = run("disk", "adopt", disk, "--json")
    assert given.returncode == 0
    assert str(first_pool) in given.stdout
    serve(second_pool, *below(disk))
    assert eventually(lambda: has_all(second_pool))


def test_an_owner_with_a_name_may_move_its_pool(
    shm: Path, tmp_path: Path, serve: Start, run: Run
) -> None:
    first_pool, second_pool, disk = made(shm / "one"), made(shm / "two"), tmp_path / "disk"
    named = [*below(disk), "--disk-owner", "rack 7"]
    first = serve(first_pool, *named)
    save(first_pool, disk)
    kill(first)
    serve(second_pool, *named)
    assert eventually(lambda: has_all(second_pool))
    alone = run("serve", "--pool", first_pool, "--disk-owner", "rack 7")
    assert alone.returncode == 2
    assert "needs --disk" in alone.stderr


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def content(name: str) -> NDArray[np.uint8]:
    seed = int.from_bytes(digest(name)[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, (1, SET_LENGTH), np.uint8)


class Served:
    """A cache of a served pool over some disks."""

    def __init__(self, cache: KVCache, server: IndexServer, service: TierService) -> None:
        self.cache, self.server, self._service = cache, server, service

    def save(self, *names: str) -> None:
        """Put blocks, and wait until the disk has them."""
        for name in names:
            assert self.cache.put([digest(name)], content(name)).stored
        assert eventually(lambda: self.server.lower_stat().dirty_count == 0, LONG_S)

    def has(self, name: str) -> bool:
        """Return whether a block is found with its bytes."""
        target = np.zeros((1, SET_LENGTH), np.uint8)
        self.cache.onboard([digest(name)], wait_s=LONG_S)
        hit = self.cache.get([digest(name)], target).hits == 1
        assert not hit or (target == content(name)).all()
        return hit

    def on_disk(self, name: str) -> bool:
        """Return whether a disk has a block."""
        return bool(self._service.tiers[0].contains(self.cache.keys([digest(name)]))[0])

    def remove(self, *names: str) -> None:
        self.cache.remove([digest(name) for name in names])


@contextmanager
def serving(path: Path, *disks: Path, forget: str = "") -> Iterator[Served]:
    """Serve the pool over these disks."""
    names = tuple(map(str, disks))
    tiers = TierSettings(disks=names, disk_bytes=SET_SIZE * len(names), admission="always")
    with Pool.open([path]) as pool:
        server = IndexServer(pool)
        if forget:
            server.give_up_tier(forget)
        service = TierService(server, pool, tiers)
        with server:
            service.start()
            try:
                with KVCache(pool, namespace="test", timeout_s=20) as cache:
                    yield Served(cache, server, service)
            finally:
                service.stop()


@pytest.fixture
def pool(shm: Path) -> Path:
    Pool.create([shm / "pool"], device_size=24 << 20, sparse=True).close()
    return shm / "pool"


def test_a_removal_reaches_a_disk_that_another_one_has_replaced(pool: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with serving(pool, first) as served:
        served.save("removed", "stays")
    with serving(pool, second) as served:
        served.remove("removed")
        assert not served.has("removed")
    with serving(pool, first) as served:
        assert not served.has("removed")
        assert served.has("stays") and served.on_disk("stays")


def test_a_removal_that_a_disk_has_refused_waits_for_that_disk(pool: Path, tmp_path: Path) -> None:
    """The tombstone is not cleared by another disk, which has no such block."""
    first, second = tmp_path / "first", tmp_path / "second"
    with serving(pool, first) as served:
        served.save("removed")
        (first / "blocks").rename(first / "away")  # the file system is gone for a while
        served.remove("removed")
    with serving(pool, second) as served:
        assert not served.has("removed")
        assert served.server.lower_stat().removal_parked == 1
    (first / "away").rename(first / "blocks")
    with serving(pool, first) as served:
        assert not served.has("removed")
        assert eventually(lambda: served.server.lower_stat().removal_count == 0, LONG_S)


def test_a_file_that_was_replaced_and_restored_has_no_blocks(pool: Path, tmp_path: Path) -> None:
    """A removal that the file in its place has executed is not one of the file that comes back."""
    disk = tmp_path / "disk"
    with serving(pool, disk) as served:
        served.save("removed")
        (disk / "blocks").rename(disk / "away")
    with serving(pool, disk) as served:  # with a new file
        served.remove("removed")
        served.save("other")
    (disk / "blocks").rename(disk / "between")
    (disk / "away").rename(disk / "blocks")
    with serving(pool, disk) as served:
        assert not served.has("removed")


def test_more_disks_and_fewer_are_the_same_set(pool: Path, tmp_path: Path) -> None:
    first_disk, second_disk, third_disk = (tmp_path / name for name in ("one", "other", "third"))
    with serving(pool, first_disk) as served:
        served.save("a", "b")
    with serving(pool, first_disk, second_disk) as served:
        assert served.has("a") and served.has("b")
        served.remove("a")
    with serving(pool, first_disk) as served:
        assert not served.has("a")
        assert served.on_disk("b")
        assert served.server.lower_stat().tier_count == 2  # this disk has left the set of both
    with serving(pool, third_disk) as served:
        served.save("c")
    with serving(pool, first_disk, third_disk) as served:  # the third one is formatted again
        assert served.on_disk("b")
        assert not served.has("a")
        assert served.server.lower_stat().tier_count == 3


def test_disks_removed_for_good_are_dropped_at_once(pool: Path, tmp_path: Path) -> None:
    for number in range(3):
        with serving(pool, tmp_path / f"{number}") as served:
            served.save(f"{number}")
    with serving(pool, tmp_path / "2") as served:
        served.remove("2")
        stat = served.server.lower_stat()
        assert (stat.tier_count, stat.removal_parked) == (3, 2)
    with serving(pool, tmp_path / "2", forget="disk") as served:
        stat = served.server.lower_stat()
        assert (stat.tier_count, stat.removal_count) == (1, 0)
        assert not served.has("2")


def test_a_disk_of_a_release_without_sets_keeps_its_blocks(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    with monkeypatch.context() as patch:
        patch.setattr(file, "new_set", lambda: 0)
        with serving(pool, disk) as served:
            served.save("a", "b")
    with serving(pool, disk) as served:
        served.remove("a")
        assert served.has("b")
        assert served.server.lower_stat().tier_count == 1
    with serving(pool, tmp_path / "new") as served:
        served.remove("b")
    with serving(pool, disk) as served:
        assert not served.has("a")
        assert not served.has("b")


def test_a_disk_of_another_set_is_empty(tmp_path: Path) -> None:
    """It may have missed removals of the set that it is in now."""
    for number, has in ((1, 0), (1, 3), (None, 3), (2, 0), (1, 0), (None, 3)):
        disk_set = None if number is None else file.DiskSet(number, 1)
        tier = DiskTier(tmp_path / "disk", SET_SIZE, disk_set=disk_set)
        assert len(tier.keys()) == has, number
        assert tier.save(records_of(range(3), 4096), payload_of(range(3), 4096)).all()
        tier.close()


SET_NAMES = [f"block {number}" for number in range(8)]


@pytest.mark.parametrize("order", ["away", "away and here", "here and away"])
def test_a_removal_reaches_a_disk_that_was_taken_out_of_the_set(
    pool: Path, tmp_path: Path, order: str
) -> None:
    disks = {name: tmp_path / name for name in ("away", "here")}
    with serving(pool, disks["away"]) as served:
        served.save(*SET_NAMES)
    with serving(pool, *disks.values()) as served:
        assert all(served.has(name) for name in SET_NAMES)
    with serving(pool, disks["here"]) as served:
        served.remove(*SET_NAMES)
    with serving(pool, *(disks[name] for name in order.split(" and "))) as served:
        assert not any(served.has(name) for name in SET_NAMES)


@pytest.mark.parametrize("forget", ["", "disk"])
def test_a_disk_that_leaves_a_set_executes_its_removals(
    pool: Path, tmp_path: Path, forget: str
) -> None:
    """They are pending, because a disk of the set has refused them."""
    disks = [tmp_path / name for name in ("here", "away")]
    with serving(pool, disks[0]) as served:
        served.save(*SET_NAMES)
    with serving(pool, *disks) as served:
        for disk in disks:
            (disk / "blocks").rename(disk / "away")
        served.remove(*SET_NAMES[:4])
        assert served.server.lower_stat().removal_count > 0
    for disk in disks:
        (disk / "away").replace(disk / "blocks")
    with serving(pool, disks[0], forget=forget) as served:
        assert not any(served.has(name) for name in SET_NAMES[:4])
        assert any(served.on_disk(name) for name in SET_NAMES[4:])
    with serving(pool, disks[0]) as served:
        assert not any(served.has(name) for name in SET_NAMES[:4])
