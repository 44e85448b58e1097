# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Leftovers of other processes: stale pools in /dev/shm, and runtime directories."""

import fcntl
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_machine import UNREADABLE, finding, made, spoil

from beluga.doctor import Finding, PoolLook
from beluga.pool import Pool, show_size

SIZE = 8 << 20
STRANGER = 4321


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder /dev/shm of the made-up machine."""
    monkeypatch.delenv("BELUGA_RUNTIME_DIR", raising=False)
    made(tmp_path)
    return tmp_path / "dev/shm"


@pytest.fixture
def paths(shm: Path) -> Iterator[list[Path]]:
    """A pool that was used, but not by any live process."""
    (shm / "folder").mkdir()
    paths = [shm / "folder/a b", shm / "folder/c"]
    with Pool.create(paths, device_size=SIZE, sparse=True) as pool:
        (pool.runtime_dir / "alive-1").touch()
    yield paths


def stale(root: Path, **facts: Any) -> Finding:
    return finding("stale-pools", made(root, **facts))


def mapped(path: Path, *, device: int = 0, inode: int = 0) -> str:
    """Return a line of /proc/PID/maps for the file, or with numbers that are larger by an
    offset.
    """
    stat = path.stat()
    numbers = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev) + device:02x}"
    return f"7f00-7f01 rw-s 00000000 {numbers} {stat.st_ino + inode}   {path} (deleted)\n"


def closed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make files that this user cannot open."""
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name in names:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)


def test_doctor_reports_an_unused_pool_with_its_size(tmp_path: Path, paths: list[Path]) -> None:
    result = stale(tmp_path)
    assert result.level == "warning"
    size = sum(path.stat().st_blocks * 512 for path in paths)
    assert f"no process uses 1 pools, which take {show_size(size)}: " in result.text
    assert str(paths[0]) in result.text
    words = shlex.split(result.fix)
    assert words == ["beluga", "pool", "destroy", "--yes", *map(str, paths)]
    Pool.destroy(words[4:])
    assert stale(tmp_path).level == "ok"


def test_a_mapped_pool_is_in_use(tmp_path: Path, paths: list[Path]) -> None:
    # Entries that are not numbers, and processes of other users, come before and after it.
    others = dict.fromkeys(("proc/1-/maps", "proc/66/maps", "proc/88/maps"), UNREADABLE)
    spoil(tmp_path, {**others, "proc/77/maps": "x\n" + mapped(paths[1])})
    assert stale(tmp_path).level == "ok"


@pytest.mark.parametrize("more", [{"inode": 1_000_000}, {"device": 1}], ids=str)
def test_a_mapping_of_another_file_does_not_count_as_use(
    tmp_path: Path, paths: list[Path], more: dict[str, int]
) -> None:
    other = mapped(paths[1], **more)
    spoil(tmp_path, {"proc/77/maps": other, "proc/78/maps": UNREADABLE, "proc/x/maps": "y"})
    assert stale(tmp_path).level == "warning"


def test_a_locked_pool_is_in_use(tmp_path: Path, paths: list[Path]) -> None:
    spoil(tmp_path, {"proc/77/maps": UNREADABLE})
    with Path(f"{paths[0]}.run/alive-1").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert stale(tmp_path).level == "ok"
    assert stale(tmp_path).level == "warning"


def test_the_examined_pool_is_not_stale(tmp_path: Path, paths: list[Path]) -> None:
    assert stale(tmp_path, pool=PoolLook(tuple(paths))).level == "ok"


def test_a_damaged_pool_can_be_stale(tmp_path: Path, paths: list[Path]) -> None:
    with paths[1].open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    result = stale(tmp_path)
    assert "no process uses 2 pools" in result.text
    Pool.destroy(shlex.split(result.fix)[4:])
    assert not any(path.exists() for path in paths)


def test_files_that_are_not_pools_are_ignored(tmp_path: Path, shm: Path) -> None:
    (shm / "other").write_bytes(b"BELUGA" + bytes(8192))
    os.mkfifo(shm / "pipe")  # opening it would block
    (shm / "link").symlink_to(shm / "nothing")
    assert stale(tmp_path).level == "ok"


def test_doctor_reports_an_unreadable_pool_as_unknown(
    tmp_path: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = made(tmp_path)
    closed(monkeypatch, *(path.name for path in paths))
    result = finding("stale-pools", machine)
    assert (result.level, result.fix) == ("warning", "sudo beluga doctor")
    assert "unknown: " in result.text
    assert str(paths[0]) in result.text


def test_a_lock_that_cannot_be_read_keeps_the_pool(tmp_path: Path, paths: list[Path]) -> None:
    lock = Path(f"{paths[0]}.run/alive-1")
    lock.unlink()
    lock.mkdir()  # opening it fails for root, too
    result = stale(tmp_path)
    assert result.fix == "sudo beluga doctor"


def test_a_runtime_directory_that_cannot_be_read_keeps_the_pool(
    tmp_path: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = made(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    result = finding("stale-pools", machine)
    assert result.fix == "sudo beluga doctor"
    assert f"{paths[0]}.run" in result.text


def test_files_of_other_users_are_not_listed_as_pools(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shm / "psm_1").touch()
    machine = made(tmp_path)
    closed(monkeypatch, "psm_1")
    assert finding("stale-pools", machine).level == "ok"


def test_a_runtime_directory_without_its_file_is_left_over(tmp_path: Path, shm: Path) -> None:
    for name in ("gone.run", "slice@0x200000.run", "here.run"):
        (shm / name).mkdir()
    (shm / "here").touch()
    result = stale(tmp_path)
    assert result.level == "warning"
    assert shlex.split(result.fix) == ["rm", "-r", *(
        str(shm / name) for name in ("gone.run", "slice@0x200000.run")
    )]  # fmt: skip


def folders(root: Path, **facts: Any) -> Finding:
    return finding("runtime-dirs", made(root, **facts))


def foreign(path: Path, mode: int = 0o700) -> None:
    """Make a directory that belongs neither to the made-up user nor to root."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)


POOL_ID = "0123456789abcdef" * 2


@pytest.mark.usefixtures("shm")
def test_a_runtime_directory_that_another_user_has_prepared_is_an_error(tmp_path: Path) -> None:
    uid = 987654  # the owner of no pool
    foreign(tmp_path / f"tmp/beluga-{uid}", 0o777)
    result = folders(tmp_path, uid=uid)
    assert result.level == "error"
    assert result.fix == f"sudo rm -r {tmp_path}/tmp/beluga-{uid}"


@pytest.mark.usefixtures("shm")
def test_a_link_where_lock_files_lie_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/beluga").symlink_to("/nowhere")
    result = folders(tmp_path)
    assert (result.level, result.fix) == ("error", f"rm {tmp_path}/run/beluga")


@pytest.mark.usefixtures("shm")
def test_runtime_directories_of_other_users_are_reported(tmp_path: Path) -> None:
    (tmp_path / "tmp/beluga-1001/measurements").mkdir(parents=True)
    (tmp_path / "tmp/beluga-mutants" / POOL_ID).mkdir(parents=True)
    assert folders(tmp_path).level == "ok", "no pool's lock files are there"
    (tmp_path / "tmp/beluga-1001" / POOL_ID).mkdir()
    (tmp_path / "run/user/1002/beluga" / POOL_ID).mkdir(parents=True)
    result = folders(tmp_path)
    assert result.level == "warning"
    assert "tmp/beluga-1001" in result.text
    assert "run/user/1002/beluga" in result.text
    assert "BELUGA_RUNTIME_DIR=" in result.fix
    without_devdax = made(tmp_path, {"sys/bus/dax": None})
    assert finding("runtime-dirs", without_devdax).level == "ok", "pools lie in files"


def test_a_pool_without_permission_is_reported(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = 987654
    (shm / "theirs").touch()
    foreign(shm / "theirs.run", 0o700)
    if os.geteuid() == 0:
        os.chown(shm / "theirs", STRANGER, STRANGER)
    result = folders(tmp_path, uid=uid)
    assert result.level == "warning"
    assert "theirs.run" in result.text
    (shm / "theirs.run").chmod(0o777)
    assert folders(tmp_path, uid=uid).level == "ok"
    (shm / "theirs.run").chmod(0o700)
    monkeypatch.setattr("os.access", lambda path, mode: "theirs" not in str(path))
    assert folders(tmp_path, uid=uid).level == "ok", "the pool itself is closed to this user"


@pytest.mark.usefixtures("shm")
def test_the_given_directory_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "given"
    monkeypatch.setenv("BELUGA_RUNTIME_DIR", str(given))
    assert folders(tmp_path).level == "ok", "it is made when it is needed"
    given.touch()
    assert folders(tmp_path).level == "error"
    given.unlink()
    foreign(given, 0o700)
    assert folders(tmp_path, uid=987654).level == "warning", "it is closed to this user"
    given.chmod(0o777)
    foreign(given / POOL_ID, 0o777)
    assert folders(tmp_path, uid=987654).level == "ok", "its users are trusted"


def test_the_remedy_destroys_exactly_the_listed_pools(
    tmp_path: Path, paths: list[Path], shm: Path
) -> None:
    for number in range(7):
        Pool.create(shm / f"more{number}", device_size=8 << 20, sparse=True).close()
    result = stale(tmp_path)
    assert "and 3 more" in result.text
    named = shlex.split(result.fix)[4:]
    assert all(path in result.text for path in named if path != str(paths[1]))
    Pool.destroy(named)
    assert "no process uses 3 pools" in stale(tmp_path).text


def test_a_pool_that_lacks_a_device_is_destroyed_by_force(
    tmp_path: Path, paths: list[Path]
) -> None:
    paths[1].unlink()
    words = shlex.split(stale(tmp_path).fix)
    assert words == ["beluga", "pool", "destroy", "--yes", "--force", str(paths[0])]
    Pool.destroy(words[5:], force=True)
    assert stale(tmp_path).level == "ok"


def test_each_process_that_holds_removed_files_is_named_once(tmp_path: Path, shm: Path) -> None:
    core = "7e00-7e01 r-xp 00000000 00:00 1   /opt/beluga/_core.abi3.so\n"
    for pid in range(101, 109):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        lines = [
            f"7f0000000000-7f0000400000 rw-s 00000000 00:00 9   /dev/shm/{pid}/{name} (deleted)\n"
            for name in range(8)
        ]
        (tmp_path / f"proc/{pid}/maps").write_text(core + "".join(lines))
    result = stale(tmp_path)
    assert all(f"process {pid} of /dev/shm/{pid}/0, " in result.text for pid in range(101, 109))
    assert result.fix == "kill " + " ".join(map(str, range(101, 109)))
