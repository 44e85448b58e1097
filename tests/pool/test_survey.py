# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Pools of this machine, and scratch folders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from beluga._ffi import ffi, lib
from beluga.pool import Pool, scratch_folder, survey
from beluga.pool.layout import SUPERBLOCK_SIZE

SIZE = 16 << 20
CHECK_AT = dict(ffi.typeof("bl_superblock").fields)["check"].offset


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[list[Path]]:
    paths = [tmp_path / name for name in "abc"]
    Pool.create(paths, device_size=SIZE, sparse=True).close()
    yield paths


def write(path: Path, raw: bytes, at: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(raw)


def forge(path: Path, change: Callable[[Any], None]) -> None:
    """Write other values into the superblock, and correct its check."""
    raw = ffi.new("bl_superblock *")
    with path.open("rb") as file:
        ffi.memmove(raw, file.read(SUPERBLOCK_SIZE), SUPERBLOCK_SIZE)
    change(raw)
    raw.check = lib.bl_crc32c(0, raw, CHECK_AT)
    write(path, bytes(ffi.buffer(raw)))


def forged(field: str, value: object) -> Callable[[Path], None]:
    def change(raw: Any) -> None:
        struct = raw.geometry if field.startswith("geometry.") else raw
        setattr(struct, field.removeprefix("geometry."), value)

    return lambda path: forge(path, change)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(SIZE - (2 << 20))


PLANTS: list[tuple[str, Callable[[Path], None]]] = [
    ("superblock-empty", lambda path: write(path, bytes(SUPERBLOCK_SIZE))),
    ("superblock-foreign", lambda path: write(path, b"X")),
    ("superblock-version", forged("version", 77)),
    ("superblock-damaged", lambda path: write(path, b"damage", 100)),
    ("superblock-format", forged("format_hash", 1)),
    ("superblock-geometry", forged("geometry.lane_count", 0)),
    ("superblock-geometry", forged("geometry.table_offset", 64)),
    ("superblock-geometry", forged("device_index", 3)),
    ("superblock-geometry", forged("coherence", 9)),
    ("superblock-geometry", forged("stripe_size", 1)),
    ("superblock-reserved", forged("reserved", [5])),
    ("superblock-reserved", forged("reserved_tail", 5)),
    ("superblock-pool", forged("pool_id", b"x" * 16)),
    ("superblock-twice", forged("device_index", 0)),
    ("device-truncated", truncate),
]


def test_a_healthy_pool_has_no_findings(paths: list[Path]) -> None:
    assert survey(paths) == []
    assert survey(paths[::-1]) == []


@pytest.mark.parametrize(("kind", "plant"), PLANTS, ids=[kind for kind, _ in PLANTS])
def test_damage_is_found(paths: list[Path], kind: str, plant: Callable[[Path], None]) -> None:
    plant(paths[1])
    findings = survey(paths)
    assert findings[0].startswith(f"{kind} {paths[1]}: ")
    assert [text.split()[0] for text in findings[1:]] in ([], ["device-missing"])


def test_another_geometry_is_found(paths: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    others = [other, tmp_path / "d", tmp_path / "e"]
    Pool.create(others, device_size=SIZE, sparse=True, lane_count=3).close()
    with paths[0].open("rb") as file:
        identity = ffi.new("bl_superblock *")
        ffi.memmove(identity, file.read(SUPERBLOCK_SIZE), SUPERBLOCK_SIZE)
    forge(other, lambda raw: setattr(raw, "pool_id", bytes(identity.pool_id)))
    findings = survey([paths[1], other, paths[2]])
    assert findings[0].startswith(f"superblock-disagrees {other}: ")


def test_a_missing_device_is_found(paths: list[Path]) -> None:
    assert survey(paths[:2]) == ["device-missing 2: of 3"]


HOLDER = """
import sys, time
from pathlib import Path
from beluga.pool import scratch_folder
with scratch_folder("test", Path(sys.argv[1])) as folder:
    (folder / "device.0").write_bytes(b"KV")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A process that has a folder, until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        yield child
        child.kill()


def folder_of(holder: subprocess.Popen[str]) -> Path:
    assert holder.stdout is not None
    return Path(holder.stdout.readline().strip())


def test_a_scratch_folder_is_removed_after_use(tmp_path: Path) -> None:
    with scratch_folder("test", tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "device.0").write_bytes(b"KV")
        (folder / "below").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_a_killed_process_are_removed_by_the_next(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    left = folder_of(holder)
    holder.kill()
    holder.wait()
    assert left.exists()
    with scratch_folder("another", tmp_path):
        assert not left.exists()


def test_the_folder_of_a_running_process_is_kept(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    held = folder_of(holder)
    with scratch_folder("test", tmp_path) as own:
        assert (held / "device.0").exists()
        with scratch_folder("test", tmp_path):
            assert own.exists(), "this process holds its first one"


def test_a_folder_that_may_be_in_use_is_kept(tmp_path: Path) -> None:
    lock = "beluga-owner.lock"
    unmarked = tmp_path / "beluga-replay-1"
    unmarked.mkdir()
    (unmarked / "device.0").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in (lock, "mine"):
        (elsewhere / name).touch()
    (tmp_path / "beluga-link").symlink_to(elsewhere)
    linked = tmp_path / "beluga-replay-2"
    linked.mkdir()
    (linked / lock).symlink_to(elsewhere / lock)
    with scratch_folder("test", tmp_path):
        pass
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"beluga-replay-1", "beluga-replay-2", "beluga-link", "elsewhere"}
    assert (unmarked / "device.0").exists()
    assert {path.name for path in elsewhere.iterdir()} == {lock, "mine"}
