# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The runtime directory, the default pool, pools of this machine, and scratch folders."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused

from beluga._ffi import ffi, lib
from beluga.errors import DevicePermissionError, NoDefaultPoolError
from beluga.pool import (
    Pool,
    SpecLike,
    remove_default,
    runtime,
    scratch_folder,
    stored_specs,
    storing_default,
    survey,
)
from beluga.pool.device import Device, DeviceSpec
from beluga.pool.layout import SUPERBLOCK_SIZE
from beluga.pool.runtime import make_runtime_dir, runtime_path
from beluga.rpc import Client, Server

MIB = 1 << 20


@pytest.fixture
def pool(two: list[Path]) -> list[Path]:
    Pool.create(two, device_size=8 * MIB, sparse=True).close()
    return two


def test_the_directory_is_next_to_the_first_device(pool: list[Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(pool[0])
    with Pool.open([pool[1], tmp_path / "link"]) as opened:
        assert opened.runtime_dir == pool[0].with_name("pool.0.run")
        assert opened.runtime_dir.is_dir()
        assert opened.runtime_dir.stat().st_mode & 0o7777 == 0o700


def test_a_file_and_the_slice_that_is_all_of_it_have_one_directory(pool: list[Path]) -> None:
    slices = [f"{path}@0+{8 * MIB}" for path in pool]
    with Pool.open(pool) as whole, Pool.open(slices) as sliced:
        assert whole.runtime_dir == sliced.runtime_dir
        with Server(sliced), Client(whole) as client:
            assert client.ping() > 0


def test_slices_of_one_file_have_directories_of_their_own(tmp_path: Path) -> None:
    slices = [f"{tmp_path / 'file'}@{offset}+{8 * MIB}" for offset in (0, 8 * MIB)]
    (tmp_path / "file").write_bytes(b"")
    os.truncate(tmp_path / "file", 16 * MIB)
    with (
        Pool.create(slices[:1], sparse=True) as first,
        Pool.create(slices[1:], sparse=True) as other,
    ):
        assert first.runtime_dir != other.runtime_dir


def test_directory_is_shared_with_the_group_of_the_file(pool: list[Path]) -> None:
    group = 1 if os.geteuid() == 0 else os.getegid()
    os.chown(pool[0], -1, group)
    pool[0].chmod(0o660)
    with Pool.open(pool) as opened:
        stat = opened.runtime_dir.stat()
    assert stat.st_gid == group
    assert stat.st_mode & 0o7777 == 0o2770


def test_another_object_at_the_path_is_rejected(pool: list[Path]) -> None:
    pool[0].with_name("pool.0.run").symlink_to("/tmp")
    with Pool.open(pool) as opened, refused(DevicePermissionError, "remove it"):
        _ = opened.runtime_dir


DEVDAX = Device(DeviceSpec(Path("/dev/null")), "devdax", 8 * MIB, True, ())


def make_anothers(folder: Path) -> Path:
    """Make a directory of another user that all may write to."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a directory of another user")
    folder.mkdir(mode=0o777)
    os.chown(folder, 12345, -1)
    return folder


def test_directory_of_another_user_is_refused(pool: list[Path]) -> None:
    make_anothers(pool[0].with_name("pool.0.run"))
    with Pool.open(pool) as opened, refused(DevicePermissionError, "another user"):
        _ = opened.runtime_dir


def test_devdax_pools_have_a_directory_named_by_their_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.config.runtime_root", lambda: tmp_path / "run")
    path = make_runtime_dir(DEVDAX, "ab12")
    assert path == runtime_path(DEVDAX, "ab12") == tmp_path / "run/ab12"
    assert path.is_dir()
    assert [each.stat().st_mode & 0o7777 for each in (path.parent, path)] == [0o700, 0o700]
    assert make_runtime_dir(DEVDAX, "ab12") == path


def test_a_configured_directory_is_trusted_unless_world_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that another user prepared for a pool is detected by its owner."""
    monkeypatch.setenv("BELUGA_RUNTIME_DIR", str(tmp_path))
    folder = make_anothers(tmp_path / "ab12")
    tmp_path.chmod(0o755)
    assert make_runtime_dir(DEVDAX, "ab12") == folder
    tmp_path.chmod(0o1777)
    with refused(DevicePermissionError, "another user"):
        make_runtime_dir(DEVDAX, "ab12")


def test_a_directory_prepared_by_another_user_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a directory in /tmp with a predictable name could replace our files."""
    root = make_anothers(tmp_path / "beluga-1000")
    monkeypatch.setattr("beluga.config.runtime_root", lambda: root)
    assert make_runtime_dir(DEVDAX, "ab12").is_dir(), "tmp_path is ours alone"
    tmp_path.chmod(0o1777)
    with refused(DevicePermissionError, "beluga-1000 belongs to another user"):
        make_runtime_dir(DEVDAX, "cd34")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a mounted pool."""
    monkeypatch.delenv("BELUGA_POOL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(runtime, "emulated_paths", lambda: [str(tmp_path / "emulated")])
    return tmp_path


def make(*paths: Path) -> str:
    with Pool.create(paths, device_size=8 * MIB, sparse=True) as pool:
        return pool.id


def remember(paths: Sequence[SpecLike]) -> None:
    with storing_default(paths):
        pass


def mounted() -> str:
    with Pool.mount() as pool:
        return pool.id


def test_without_a_mounted_pool_the_error_names_the_command() -> None:
    with refused(NoDefaultPoolError, "beluga mount --create", "--pool"):
        Pool.mount()


def test_the_stored_pool_is_mounted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = make(home / "a", home / "b")
    monkeypatch.chdir(home)
    remember(["b,link=cxl0", "a"])
    monkeypatch.chdir("/")
    assert mounted() == identity
    assert [spec.link for spec in stored_specs()] == ["cxl0", None]
    assert (home / "state/beluga").stat().st_mode & 0o777 == 0o700


def test_the_environment_precedes_the_stored_pool_and_that_the_emulated_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated, stored, named = (
        make(*(home / name for name in names)) for names in (["emulated"], ["a"], ["b", "c"])
    )
    assert mounted() == emulated
    remember([home / "a"])
    assert mounted() == stored
    monkeypatch.setenv("BELUGA_POOL", f"{home / 'b'}:{home / 'c'}")
    assert mounted() == named


def test_a_removed_default_pool_is_not_mounted(home: Path) -> None:
    make(home / "a")
    remember([home / "a"])
    assert remove_default()
    assert not remove_default()
    assert stored_specs() == []


def test_a_damaged_default_record_is_rejected(home: Path) -> None:
    remember([home / "a"])
    (home / "state/beluga/default.json").write_text("{")
    with refused(NoDefaultPoolError, "default.json", "mount again"):
        Pool.mount()


def test_without_a_state_variable_the_record_is_in_the_home_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(home))
    remember([home / "a"])
    state = home / ".local/state/beluga"
    assert list(state.iterdir()) == [state / "default.json"]


def test_a_failed_block_stores_no_default_pool(home: Path) -> None:
    make(home / "a")
    remember([home / "a"])
    with pytest.raises(KeyError), storing_default([home / "b"]):
        raise KeyError
    assert [spec.path for spec in stored_specs()] == [home / "a"]
    assert [path.name for path in (home / "state/beluga").iterdir()] == ["default.json"]


def test_a_read_only_home_is_rejected_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    messages = "file/beluga: Not a directory", "set HOME or XDG_STATE_HOME"
    with refused(NoDefaultPoolError, *messages), storing_default([home / "a"]):
        pytest.fail("the work began")


def test_a_removed_pool_and_a_reboot_have_different_errors(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember([home / "a"])
    with refused(NoDefaultPoolError, "was removed", f"beluga mount --create {home}/a", "umount"):
        Pool.mount()
    os.utime(home / "state/beluga/default.json", (0, 0))
    with refused(NoDefaultPoolError, "rebooted (20"):
        Pool.mount()
    monkeypatch.setattr(runtime, "_boot_time", lambda: time.time() - 60)
    remember(["/dev/shm/beluga-nobody/gone"])
    os.utime(home / "state/beluga/default.json", (0, 0))
    with refused(NoDefaultPoolError, "which empties /dev/shm"):
        Pool.mount()


# ---- Pools of this machine, and scratch folders.


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
