# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Opening the file of a disk tier: when it is formatted or rejected, and other sizes."""

from __future__ import annotations

import logging
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.disk_tiers import MIB, is_block, keys_of, payload_of, records_of

from beluga.coherence import crc32c
from beluga.errors import TierError
from beluga.tiers.disk import DiskTier, SpreadTier
from beluga.tiers.disk import file as disk_file

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
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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
