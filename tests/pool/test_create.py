# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Create a pool: its options, the space that it needs, and what is refused."""

import errno
import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from devdax import MIB, fake_devdax
from support.emulation import needs_a_cpu
from support.forks import as_nobody
from support.refusals import Refusal, refusals, refused
from support.watched_core import WatchedCore

from beluga import Client, IndexServer, KVCache
from beluga._ffi import ffi
from beluga.errors import (
    DeviceBusyError,
    DeviceForeignError,
    DeviceMismatchError,
    DeviceMissingError,
    DevicePermissionError,
    DeviceSpecError,
    NoRoomError,
    PoolError,
    PoolExistsError,
)
from beluga.pool import Pool, remove_default, stored_specs, storing_default
from beluga.pool import create as creation
from beluga.pool.create import Limit, limits, require_room, room
from beluga.pool.device import DeviceSpec, examine
from beluga.pool.layout import Layout, NewPoolSettings
from beluga.rpc import nanoseconds

NO_LIMIT_V1 = "9223372036854771712"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB available, no control group, and tmp_path on a tmpfs."""
    root = tmp_path / "root"
    number = tmp_path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    write(root / "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB")
    write(root / "proc/self/mountinfo", f"1 0 {device} / /tmp rw shared:1 - tmpfs tmpfs rw")
    return root


def sizes_of(directory: Path, root: Path) -> dict[str, int]:
    return {limit.what: limit.size for limit in limits(directory, root=root)}


def group_v2(root: Path, name: str, limit: int | None, current: int, files: int = 0) -> None:
    """Make a control group; sizes are in MiB."""
    group = root / "sys/fs/cgroup" / name
    write(group / "memory.max", "max" if limit is None else str(limit * MIB))
    write(group / "memory.current", str(current * MIB))
    write(group / "memory.stat", f"anon 5\ninactive_file {files * MIB}\nactive_file 0\nshmem 7")


def test_free_space_is_limited_by_filesystem_and_memory(tmp_path: Path, root: Path) -> None:
    stat = os.statvfs(tmp_path)
    sizes = sizes_of(tmp_path, root)
    assert sizes["available memory"] == 8 << 30
    assert abs(sizes["the filesystem"] - stat.f_bavail * stat.f_frsize) < 64 * MIB
    assert len(sizes) == 2


@pytest.mark.parametrize(
    ("process", "groups", "free"),
    [
        # Every parent limits it.
        ("/a/b/c", [("a", 300, 200), ("a/b", None, 10), ("a/b/c", 910, 20)], {"a": 100, "c": 890}),
        ("/a", [("a", 300, 200, 150)], {"a": 250}),  # the cache of files counts as free
        # A container's own group has no name in it.
        ("/only/outside/sees/this", [(".", 100, 36)], {"cgroup": 64}),
        ("/a", [("a", 100, 120)], {"a": -20}),  # more than full
    ],
)
def test_free_space_is_limited_by_control_groups(
    tmp_path: Path, root: Path, process: str, groups: list[Any], free: dict[str, int]
) -> None:
    write(root / "proc/self/cgroup", f"0::{process}")
    for group in groups:
        group_v2(root, *group)
    sizes = sizes_of(tmp_path, root)
    limited = {what.split()[-1]: size for what, size in sizes.items() if "control group" in what}
    assert limited == {name: size * MIB for name, size in free.items()}
    smallest = max(0.9 * min(limited.values()), 0)
    assert room(tmp_path, root=root).size == pytest.approx(smallest, abs=8)


def test_free_space_is_limited_by_cgroup_v1(tmp_path: Path, root: Path) -> None:
    write(root / "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/x/y\n0::/")
    for name, limit in ((".", NO_LIMIT_V1), ("x", str(64 * MIB)), ("x/y", NO_LIMIT_V1)):
        group = root / "sys/fs/cgroup/memory" / name
        write(group / "memory.limit_in_bytes", limit)
        write(group / "memory.usage_in_bytes", str(24 * MIB))
        write(group / "memory.stat", f"total_inactive_file {10 * MIB}\ninactive_file 1")
    sizes = sizes_of(tmp_path, root)
    assert sizes["the memory limit of control group x"] == 50 * MIB
    assert len(sizes) == 3


def test_free_huge_pages_are_the_reserved_ones(tmp_path: Path, root: Path) -> None:
    info = root / "proc/self/mountinfo"
    info.write_text(info.read_text().replace("- tmpfs", "- hugetlbfs"))
    page = os.statvfs(tmp_path).f_bsize
    write(root / f"sys/kernel/mm/hugepages/hugepages-{page >> 10}kB/free_hugepages", "30")
    assert sizes_of(tmp_path, root) == {"the number of free huge pages": 30 * page}


def test_too_little_room_is_refused_with_figures(tmp_path: Path, root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a")
    group_v2(root, "a", 64, 0)
    require_room(56 * MIB, tmp_path, root=root)
    with refused(NoRoomError, "60 MiB", "57.6 MiB", "control group a", "smaller size"):
        require_room(60 * MIB, tmp_path, root=root)


@pytest.mark.parametrize("text", ["", "x", "a:b", "a - b", "MemAvailable: much", "0::/a\n\xff"])
def test_missing_kernel_files_are_ignored(tmp_path: Path, root: Path, text: str) -> None:
    for name in ("meminfo", "self/mountinfo", "self/cgroup"):
        (root / "proc" / name).write_bytes(text.encode("latin-1"))
    write(root / "sys/fs/cgroup/a/memory.max", str(300 * MIB))
    write(root / "sys/fs/cgroup/a/memory.current", str(200 * MIB))
    write(root / "sys/fs/cgroup/a/memory.stat", "inactive_file\nactive_file many")
    assert set(sizes_of(tmp_path, root)) <= {
        "the filesystem",
        "the memory limit of control group a",
    }


SIZE = 8 * MIB


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of 64 MiB in memory, as containers have for /dev/shm."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "beluga-test", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this user cannot mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)  # noqa: S607


def test_files_are_allocated_and_progress_is_reported(two: list[Path]) -> None:
    calls: list[tuple[int, int]] = []
    with Pool.create(two, device_size=SIZE, progress=lambda *step: calls.append(step)):
        assert [path.stat().st_size for path in two] == [SIZE, SIZE]
        assert [path.stat().st_blocks * 512 for path in two] == [SIZE, SIZE]
    assert calls[-1] == (2 * SIZE, 2 * SIZE)
    assert calls == sorted(calls)


def test_sparse_files_are_not_allocated_and_the_pool_is_marked_sparse(two: list[Path]) -> None:
    with Pool.create(two, device_size=SIZE, sparse=True) as pool:
        assert all(device.sparse for device in pool.devices)
        assert sum(path.stat().st_blocks * 512 for path in two) < SIZE


def test_files_are_private(two: list[Path]) -> None:
    with Pool.create(two, device_size=SIZE):
        assert [path.stat().st_mode & 0o777 for path in two] == [0o600, 0o600]


def test_existing_pool_is_kept(two: list[Path]) -> None:
    Pool.create(two, device_size=SIZE).close()
    before = [digest(path) for path in two]
    with refused(PoolExistsError, str(two[0]), "--force"):
        Pool.create(two, device_size=2 * SIZE)
    assert [digest(path) for path in two] == before


def test_force_makes_a_new_empty_pool(two: list[Path]) -> None:
    with Pool.create(two, device_size=SIZE) as old:
        dirty = old.geometry.table_offset
    with two[0].open("r+b") as file:
        file.seek(2 * MIB + dirty)
        file.write(b"entry")
    with Pool.create(two, device_size=2 * SIZE, force=True) as new:
        assert new.id != old.id
        assert new.geometry.device_size == 2 * SIZE
        data = two[0].read_bytes()
        assert not any(data[2 * MIB : 2 * MIB + new.geometry.data_offset])
    with Pool.open(two) as again:
        assert again.id == new.id


def test_force_keeps_the_existing_size(two: list[Path]) -> None:
    Pool.create(two, device_size=SIZE).close()
    with Pool.create(two, force=True) as pool:
        assert pool.geometry.device_size == SIZE


def test_damaged_pool_is_not_overwritten_without_force(two: list[Path]) -> None:
    Pool.create(two, device_size=SIZE).close()
    with two[0].open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    with refused(PoolExistsError):
        Pool.create(two, device_size=SIZE)


def test_a_file_of_another_program_is_not_overwritten(shm: Path) -> None:
    (shm / "thesis").write_text("call me Ishmael\n" * 99)
    before = digest(shm / "thesis")
    with refused(DeviceForeignError, "something other", "--force"):
        Pool.create([shm / "thesis"], device_size=SIZE)
    assert digest(shm / "thesis") == before


def test_failure_half_way_leaves_nothing(two: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        if two[1].exists():
            raise OSError(28, "No space left on device")
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with refused(NoRoomError, str(two[1]), "No space left"):
        Pool.create(two, device_size=SIZE)
    assert list(two[0].parent.iterdir()) == []


def test_interrupted_creation_leaves_old_files_as_they_were(two: list[Path]) -> None:
    two[0].touch()
    os.truncate(two[0], 4 * MIB)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pool.create(two, device_size=SIZE, progress=interrupt)
    assert list(two[0].parent.iterdir()) == [two[0]]
    assert two[0].read_bytes() == bytes(4 * MIB)


def create(*paths: Path, **settings: Any) -> None:
    Pool.create(paths, **{"device_size": SIZE, **settings})


@refusals(
    (lambda at: create(at / "a", device_size=3 * MIB), DeviceSpecError, "2 MiB"),
    (lambda at: create(at / "a", device_size=2 * MIB), DeviceSpecError, "2 MiB"),
    (lambda at: create(at / "a", device_size=0), DeviceSpecError, "2 MiB"),
    (lambda at: create(at / "a", device_size=-4 * MIB), DeviceSpecError, "2 MiB"),
    (lambda at: create(at / "a", device_size=1 << 44), NoRoomError, "not fit", "smaller size"),
    (lambda at: create(at / "a", at / "b", at / "a"), DeviceMismatchError, "same memory"),
    (lambda at: create(at / "none/pool"), DeviceMissingError, "no directory", "make it"),
    (create, DeviceMissingError, "directory"),
    (lambda _: create(), PoolError, "1 to 64 devices"),
    (lambda at: create(*(at / str(i) for i in range(65))), PoolError, "1 to 64 devices"),
    (
        lambda at: create(at / "a", at / "b", coherence=["hardware"] * 3),
        DeviceMismatchError,
        "3 coherence modes for 2 devices",
    ),
    (lambda at: create(at / "a", coherence="strict"), PoolError, "'strict'", "hardware, software"),
)
def test_wrong_devices_and_settings_are_refused(shm: Path, refusal: Refusal) -> None:
    refusal(shm)
    assert list(shm.iterdir()) == []


def test_small_filesystem_is_not_overfilled(small_tmpfs: Path) -> None:
    paths = [small_tmpfs / "a", small_tmpfs / "b"]
    with refused(NoRoomError, "64 MiB", "the filesystem", "57.6 MiB"):
        Pool.create(paths, device_size=32 * MIB)
    assert list(small_tmpfs.iterdir()) == []
    with Pool.create(paths) as pool:
        assert 2 * pool.geometry.device_size <= 0.9 * 64 * MIB
        assert pool.geometry.stripe_count > 0


def test_size_of_new_files_fits_the_room(shm: Path) -> None:
    free = room(shm).size
    with Pool.create([shm / "a", shm / "b"], sparse=True) as pool:
        assert 2 * pool.geometry.device_size <= free


def test_different_sizes_are_refused(two: list[Path]) -> None:
    for path, size in zip(two, (8 * MIB, 16 * MIB), strict=True):
        path.touch()
        os.truncate(path, size)
    with refused(DeviceMismatchError, "8 MiB", "16 MiB", "--size"):
        Pool.create(two)


def test_directory_without_permission_is_refused(shm: Path) -> None:
    shm.chmod(0o555)

    def create() -> None:
        with refused(DevicePermissionError, "Permission denied"):
            Pool.create([shm / "pool"], device_size=SIZE)

    assert as_nobody(create) == "None"


@needs_a_cpu("it leaves out MADV_POPULATE_WRITE, which takes the room")
def test_a_slice_with_enough_space_needs_no_more(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shm / "file"
    file.write_bytes(bytes(SIZE))
    os.truncate(file, 2 * SIZE)
    demanded: list[int] = []
    monkeypatch.setattr(creation, "require_room", lambda size, directory: demanded.append(size))
    Pool.create([f"{file}@0+8MiB"]).close()
    Pool.create([f"{file}@8MiB+8MiB"]).close()
    Pool.create([f"{file}@8MiB+8MiB"], force=True).close()
    assert demanded == [0, SIZE, 0]


def test_devdax_node_is_not_coherent_and_not_extended(tmp_path: Path) -> None:
    # /dev/zero can be mapped like a device but stores nothing, so only the creation succeeds.
    sysfs = fake_devdax(tmp_path, "/dev/zero", size=16 * MIB)
    mapping = creation.create(["/dev/zero@0+12MiB"], NewPoolSettings(), sysfs=sysfs)
    member = mapping.members[0]
    mapping.close()
    assert (member.device.kind, member.superblock.coherence) == ("devdax", "software")
    assert member.superblock.geometry.device_size == 12 * MIB


def test_devdax_node_that_is_too_small_is_refused(tmp_path: Path) -> None:
    sysfs = fake_devdax(tmp_path, "/dev/zero", size=16 * MIB)
    with refused(NoRoomError, "16 MiB", "32 MiB"):
        creation.create(["/dev/zero"], NewPoolSettings(device_size=32 * MIB), sysfs=sysfs)


@needs_a_cpu("it leaves out MADV_POPULATE_WRITE, which touches the device")
def test_devdax_node_that_cannot_be_touched_is_refused(tmp_path: Path) -> None:
    # /dev/zero can be mapped at an offset, where it has no data.
    sysfs = fake_devdax(tmp_path, "/dev/zero", size=16 * MIB)
    with refused(DeviceBusyError, "not accessed"):
        creation.create(["/dev/zero@2MiB+12MiB"], NewPoolSettings(), sysfs=sysfs)


def test_a_file_with_a_pool_in_a_slice_cannot_be_formatted_whole(shm: Path) -> None:
    file = shm / "shared"
    file.touch()
    os.truncate(file, 4 * SIZE)
    inner = f"{file}@{SIZE}+{SIZE}"
    Pool.create([inner]).close()
    before = digest(file)
    with refused(PoolExistsError, f"in its slice at {SIZE:#x}"):
        Pool.create([file], device_size=2 * SIZE)
    assert digest(file) == before
    Pool.open([inner]).close()
    Pool.create([f"{file}@{2 * SIZE}+{SIZE}"]).close()  # after it there is room
    Pool.create([file], device_size=SIZE, force=True).close()


def test_prefault_allocates_no_space_in_sparse_files(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=SIZE, sparse=True) as pool:
        before = (shm / "a").stat().st_blocks
        pool.prefault()
        assert (shm / "a").stat().st_blocks == before


def test_a_file_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pool.create([tmp_path / "a"], device_size=SIZE, sparse=True).close()

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PoolError):
        Pool.destroy([tmp_path / "a"])


@pytest.mark.parametrize("paths", [3, [3], None, b"/dev/shm/a"])
def test_a_device_must_be_a_path(paths: Any) -> None:
    with pytest.raises(
        TypeError, match=r"a device is .*; give a path, as text or a Path, or a DeviceSpec"
    ):
        Pool.open(paths)


@pytest.mark.parametrize(
    "name", ["device_size", "max_blocks", "block_bytes", "lane_count", "slot_count", "bulk_size"]
)
@pytest.mark.parametrize("value", ["16M", 1.5, True])
def test_sizes_of_a_pool_must_be_integers(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} is a whole number, not "):
        Pool.create(tmp_path / "a", **{name: value})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (nanoseconds, "a time must be a number of seconds, not 'foo'"),
        (lambda wrong: KVCache(wrong, namespace="n"), "a session needs a Pool, not 'foo'"),
        (Client, "a session needs a Pool, not 'foo'"),
        (IndexServer, "a server needs a Pool, not 'foo'"),
    ],
)
def test_a_session_requires_a_pool_and_a_time_a_number(
    call: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        call("foo")


GIB = 1 << 30
KIB = 1 << 10


def choose_size(folder: Path, files: list[Any], size: int | None) -> int:
    """Choose the size of devices that are files of those sizes, or a slice of 8 MiB; sizes are in
    MiB, and a file of none does not exist yet.
    """
    devices = []
    for number, length in enumerate(files):
        path = folder / str(number)
        if length:
            path.touch()
            os.truncate(path, 64 * MIB if length == "sliced" else length * MIB)
        spec = DeviceSpec.parse(f"{path}@2M+8M" if length == "sliced" else str(path))
        devices.append(examine(spec, creating=length != "sliced"))
    return creation._choose_size(devices, None if size is None else size * MIB)


@pytest.mark.parametrize(
    ("files", "size", "expected"),
    [
        ([5], 4, 4),
        ([5], 6, 6),  # a file grows
        (["sliced"], 8, 8),
        ([9, 0], None, 8),  # its own size in stripes; a new file has none
        ([4], None, 4),
    ],
)
def test_a_device_has_the_requested_or_its_own_size(
    tmp_path: Path, files: list[Any], size: int | None, expected: int
) -> None:
    assert choose_size(tmp_path, files, size) == expected * MIB


@refusals(
    *(
        (lambda at, size=size: choose_size(at, [5], size), DeviceSpecError, "multiple of 2 MiB")
        for size in (2, 5, 0)
    ),
    (lambda at: choose_size(at, ["sliced"], 10), NoRoomError, "8 MiB", "10 MiB"),
    (lambda at: choose_size(at, [3], None), NoRoomError, "at least 4 MiB"),
    (lambda at: choose_size(at, [9, 12], None), DeviceMismatchError, "different sizes"),
)
def test_a_size_that_devices_cannot_have_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    refusal(tmp_path)


@pytest.mark.parametrize(
    ("room", "devices", "size"),
    [
        (100 * GIB, 1, 4 * GIB),
        (100 * GIB, 2, 2 * GIB),
        (1 * GIB, 2, 256 * MIB),
        (14 * MIB, 1, 6 * MIB),
        (8 * MIB, 1, 4 * MIB),
        (8 * MIB - 2, 1, None),
        (8 * MIB, 2, None),
    ],
)
def test_new_files_share_half_the_room_up_to_4_gib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, devices: int, size: int | None
) -> None:
    monkeypatch.setattr(creation, "room", lambda _: Limit("the test", room))
    if size is None:
        with refused(NoRoomError, "the test leaves"):
            choose_size(tmp_path, [0] * devices, None)
    else:
        assert choose_size(tmp_path, [0] * devices, None) == size


def test_memory_that_runs_out_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = WatchedCore()
    core.fails["bl_device_populate"] = -errno.ENOMEM
    core.before["bl_device_populate"] = lambda: time.sleep(0.005)
    monkeypatch.setattr(creation, "lib", core)
    monkeypatch.setattr(creation, "_PIECE", 64 * KIB)
    with refused(NoRoomError, "memory ran out"):
        creation.create([tmp_path / "a"], NewPoolSettings(device_size=8 * MIB))
    # pieces that are still queued are not tried
    assert core.names().count("bl_device_populate") < 128
    assert not (tmp_path / "a").exists()


def test_every_byte_of_every_file_is_filled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = WatchedCore()
    monkeypatch.setattr(creation, "lib", core)
    monkeypatch.setattr(creation, "_PIECE", 3 * MIB)
    calls: list[tuple[int, int]] = []
    paths = [tmp_path / "a", tmp_path / "b"]
    creation.create(
        paths, NewPoolSettings(device_size=8 * MIB), progress=lambda *figures: calls.append(figures)
    )
    filled = sorted(
        (int(ffi.cast("uintptr_t", given[0])), given[1])
        for name, given in core.calls
        if name == "bl_device_populate"
    )
    assert sorted(size for _, size in filled) == sorted([3 * MIB, 3 * MIB, 2 * MIB] * 2)
    for half in (filled[:3], filled[3:]):
        assert [at - half[0][0] for at, _ in half] == [0, 3 * MIB, 6 * MIB]
    assert [path.stat().st_blocks * 512 for path in paths] == [8 * MIB] * 2
    assert calls[-1] == (16 * MIB, 16 * MIB)


@pytest.mark.parametrize(
    ("size", "lanes", "slots", "bulk", "blocks"),
    [
        (6 * MIB, 12, 64, 32 * KIB, 1024),
        (126 * MIB, 12, 64, 32 * KIB, 1024),
        (128 * MIB, 32, 64, 32 * KIB, 1024),
        (510 * MIB, 32, 64, 32 * KIB, 2040),
        (512 * MIB, 32, 256, 64 * KIB, 2048),
        (4 * GIB - 2 * MIB, 32, 256, 64 * KIB, 16376),
        (4 * GIB, 64, 256, 64 * KIB, 16384),
    ],
)
def test_tables_grow_with_the_pool(
    size: int, lanes: int, slots: int, bulk: int, blocks: int
) -> None:
    geometry = Layout(1, size, NewPoolSettings()).superblock(0, "file").geometry
    assert (geometry.lane_count, geometry.slot_count, geometry.bulk_size) == (lanes, slots, bulk)
    assert geometry.block_count_max == blocks
    assert geometry == Layout(1, size, NewPoolSettings()).superblock(0, "devdax").geometry


@pytest.mark.parametrize("size", [6 * MIB, 16 * MIB, 64 * MIB, 126 * MIB])
def test_the_lanes_of_a_small_pool_take_no_stripe_from_its_blocks(size: int) -> None:
    def stripes(lanes: int | None) -> int:
        layout = Layout(1, size, NewPoolSettings(lane_count=lanes))
        return layout.superblock(0, "file").geometry.stripe_count

    assert stripes(None) == stripes(1)


def test_the_default_pool_is_stored_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "not" / "yet"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    for name in ("a", "b"):  # the second one has the first one's path
        with storing_default([tmp_path / name]):
            pass
        assert stored_specs() == [DeviceSpec(tmp_path / name)]
    folders = [path for path in state.rglob("*") if path.is_dir()]
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700]
    assert [path.name for path in folders[0].iterdir()] == ["default.json"]
    assert (remove_default(), remove_default()) == (True, False)
