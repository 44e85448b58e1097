# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Open pools, their mappings, and what a closed one releases."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from devdax import MIB, fake_devdax
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulation import fewer, needs_a_cpu
from support.forks import in_child
from support.refusals import Refusal, refusals, refused
from support.watched_core import WatchedCore

from beluga._ffi import ffi, lib
from beluga.errors import (
    BelugaError,
    DeviceForeignError,
    DeviceMismatchError,
    DeviceMissingError,
    DeviceSpecError,
    DeviceTruncatedError,
    ForkedSessionError,
    FormatError,
    NoRoomError,
    PoolError,
    PoolExistsError,
    SuperblockDamagedError,
)
from beluga.pool import Pool, emulated_paths, survey
from beluga.pool import create as creation
from beluga.pool.layout import NewPoolSettings

SIZE = 8 * MIB


@pytest.fixture
def pool(two: list[Path]) -> list[Path]:
    """Devices of a pool, closed."""
    Pool.create(two, device_size=SIZE, sparse=True).close()
    return two


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_devices_may_be_given_in_any_order(shm: Path) -> None:
    paths = [shm / str(index) for index in range(3)]
    with Pool.create(paths, device_size=SIZE, sparse=True) as made:
        identity = made.id
    for order in itertools.permutations(paths):
        with Pool.open(order) as opened:
            assert opened.id == identity
            assert [device.path for device in opened.devices] == paths
            assert [device.index for device in opened.devices] == [0, 1, 2]


def test_renamed_devices_are_recognized_by_their_superblock(pool: list[Path]) -> None:
    spare = pool[0].with_name("spare")
    pool[0].rename(spare)
    pool[1].rename(pool[0])
    with Pool.open([pool[0], spare]) as opened:
        assert [device.path for device in opened.devices] == [spare, pool[0]]


def after(change: Callable[[list[Path]], object]) -> Callable[[list[Path]], object]:
    """Return a call that opens a pool after a change of its devices."""
    return lambda pool: (change(pool), Pool.open(pool))


def cut(size: int) -> Callable[[list[Path]], object]:
    return after(lambda pool: os.truncate(pool[1], size))


def wrong(offset: int, data: bytes) -> Callable[[list[Path]], object]:
    return after(lambda pool: overwrite(pool[0], offset, data))


def open_with_a_copy(pool: list[Path]) -> None:
    Pool.open([*pool, shutil.copy(pool[0], pool[0].with_name("copy"))])


@refusals(
    (lambda pool: Pool.open([]), PoolError, "1 to 64 devices"),
    (lambda pool: Pool.open(pool[:1]), DeviceMismatchError, "2 devices", "device 1 "),
    (lambda pool: Pool.open([pool[0], pool[0]]), DeviceMismatchError, "same memory"),
    (open_with_a_copy, DeviceMismatchError, "copy"),
    (after(lambda pool: pool[1].unlink()), DeviceMissingError, "pool.1"),
    (cut(SIZE - 4096), DeviceTruncatedError, "pool.1", str(SIZE)),
    (cut(100), SuperblockDamagedError, "pool.1"),
    (cut(0), DeviceForeignError, "pool.1", "--create"),
    (wrong(0, os.urandom(4096)), DeviceForeignError, "something other"),
    (wrong(64, b"\xff\xff"), SuperblockDamagedError, "pool.0"),
    (wrong(8, (99).to_bytes(4, "little")), FormatError, "99"),
)
def test_other_devices_than_the_pools_are_refused(pool: list[Path], refusal: Refusal) -> None:
    refusal(pool)


def test_device_of_another_pool_is_refused(pool: list[Path], shm: Path) -> None:
    others = [shm / "other.0", shm / "other.1"]
    with Pool.create(others, device_size=SIZE, sparse=True) as other:
        identity = other.id
    with refused(DeviceMismatchError, identity[:8], str(others[1])):
        Pool.open([pool[0], others[1]])


def test_a_larger_file_is_used_up_to_the_device_size(pool: list[Path]) -> None:
    os.truncate(pool[0], 2 * SIZE)
    with Pool.open(pool) as opened:
        assert opened.devices[0].size == SIZE


STRIPE = 2 * MIB


def position(
    offset: int, device_count: int, device_size: int, interleaved: bool
) -> tuple[int, int]:
    """Return the place of an offset: (device, offset in the device). This models
    format/interleave.h.
    """
    stripe, inside = divmod(offset, STRIPE)
    if interleaved:
        row, device = divmod(stripe, device_count)
    else:
        device, row = divmod(stripe, device_size // STRIPE - 1)
    return device, (1 + row) * STRIPE + inside


def write(pool: Pool, offset: int, data: bytes) -> None:
    ffi.memmove(lib.bl_pool_address(pool.handle, offset), data, len(data))


def read(pool: Pool, offset: int, size: int) -> bytes:
    return bytes(ffi.buffer(lib.bl_pool_address(pool.handle, offset), size))


def test_bytes_survive_close_and_open(two: list[Path]) -> None:
    with Pool.create(two, device_size=SIZE) as pool:
        end = pool.geometry.size
        write(pool, pool.geometry.data_offset, b"first")
        write(pool, end - 4, b"last")
    with Pool.open(two[::-1]) as pool:
        assert read(pool, pool.geometry.data_offset, 5) == b"first"
        assert read(pool, end - 4, 4) == b"last"
        assert lib.bl_pool_address(pool.handle, end) == ffi.NULL


def test_one_device_needs_no_list(two: list[Path]) -> None:
    for path in (str(two[0]), two[0]):
        Pool.create(path, device_size=SIZE).close()
        with Pool.open(path) as pool:
            assert [device.path for device in pool.devices] == [two[0]]
        Pool.destroy(path)
        assert not two[0].exists()


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("device_count", [1, 2, 3, 4, 5, 7])
def test_every_stripe_is_at_the_models_offset(
    shm: Path, device_count: int, interleave: bool
) -> None:
    paths = [shm / str(index) for index in range(device_count)]
    with Pool.create(
        paths, device_size=4 * SIZE, interleave=interleave, sparse=True, bulk_size=4096
    ) as pool:
        offsets = [s * STRIPE + s * 64 for s in range(pool.geometry.size // STRIPE)]
        for offset in offsets:
            write(pool, offset, (offset + 1).to_bytes(8, "little"))
    files = [path.open("rb") for path in paths]
    for offset in offsets:
        device, at = position(offset, device_count, 4 * SIZE, interleave)
        assert os.pread(files[device].fileno(), 8, at) == (offset + 1).to_bytes(8, "little")
    for file in files:
        file.close()


@pytest.mark.parametrize(("device_count", "interleave"), [(3, True), (4, True), (3, False)])
def test_addresses_match_the_model(shm: Path, device_count: int, interleave: bool) -> None:
    paths = [shm / str(index) for index in range(device_count)]
    with Pool.create(paths, device_size=1 << 30, interleave=interleave, sparse=True) as pool:

        def address(offset: int) -> int:
            return int(ffi.cast("uintptr_t", lib.bl_pool_address(pool.handle, offset)))

        first = [0] * device_count
        for offset in range(0, pool.geometry.size, STRIPE):
            device, at = position(offset, device_count, 1 << 30, interleave)
            if at == STRIPE:
                first[device] = address(offset) - at

        @settings(max_examples=fewer(200))
        @given(st.integers(0, pool.geometry.size - 1))
        def compare(offset: int) -> None:
            device, at = position(offset, device_count, 1 << 30, interleave)
            assert address(offset) == first[device] + at

        compare()
        assert all(base % STRIPE == 0 for base in first)


def test_slices_of_one_file_are_pools_of_their_own(shm: Path) -> None:
    file = shm / "file"
    file.write_bytes(b"\xaa" * 2 * MIB + bytes(20 * MIB) + b"\xbb" * 2 * MIB)
    low, high = f"{file}@2MiB+8MiB", f"{file}@10MiB+8MiB"
    with Pool.create([low]) as first, Pool.create([high]) as second:
        for pool, byte in ((first, b"\x11"), (second, b"\x22")):
            for offset in range(0, pool.geometry.size, STRIPE):
                write(pool, offset, byte * STRIPE)
        assert first.id != second.id
        assert first.runtime_dir != second.runtime_dir
        assert first.devices[0].offset == 2 * MIB
    data = file.read_bytes()
    assert data[: 2 * MIB] == b"\xaa" * 2 * MIB
    assert data[4 * MIB : 10 * MIB] == b"\x11" * 6 * MIB
    assert data[12 * MIB : 18 * MIB] == b"\x22" * 6 * MIB
    assert data[18 * MIB : 22 * MIB] == bytes(4 * MIB)
    assert data[22 * MIB :] == b"\xbb" * 2 * MIB
    with refused(DeviceForeignError):
        Pool.open([file])


@pytest.mark.parametrize(
    ("named", "recorded"),
    [
        (None, ["hardware"] * 2),
        ("hardware", ["hardware"] * 2),
        ("software", ["software"] * 2),
        (["software", "hardware"], ["software", "hardware"]),
    ],
)
@pytest.mark.parametrize("interleave", [True, False])
def test_coherence_and_interleaving_are_recorded(
    two: list[Path], named: Any, recorded: list[str], interleave: bool
) -> None:
    options = {"sparse": True, "coherence": named, "interleave": interleave}
    Pool.create(two, device_size=SIZE, **options).close()
    with Pool.open(two[::-1]) as pool:
        assert [device.coherence for device in pool.devices] == recorded
        assert pool.geometry.interleaved == interleave


def test_views_have_the_specified_values(pool: list[Path]) -> None:
    with Pool.open([f"{pool[0]},link=cxl0,node=0", pool[1]]) as opened:
        first, second = opened.devices
        assert (first.link, first.node, second.link, second.node) == ("cxl0", 0, None, None)
        assert (second.stripe_count, second.kind) == (4, "file")


def test_a_forked_child_cannot_use_the_handle(two: list[Path]) -> None:
    def child() -> None:
        with refused(ForkedSessionError, "parent"):
            _ = pool.handle
        pool.close()

    with Pool.create(two, device_size=SIZE, sparse=True) as pool:
        assert in_child(child) == "None"
        assert read(pool, 0, 1) == b"\0"


@needs_a_cpu("it leaves out MADV_DONTFORK")
def test_a_forked_child_has_no_mapping(two: list[Path]) -> None:
    with Pool.create(two, device_size=SIZE, sparse=True) as pool:
        address = lib.bl_pool_address(pool.handle, 0)

        def child() -> None:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            bytes(ffi.buffer(address, 8))

        assert in_child(child) == f"died of {int(signal.SIGSEGV)}"


def test_a_destroyed_pool_cannot_be_opened(two: list[Path]) -> None:
    with Pool.create(two, device_size=SIZE, sparse=True) as pool:
        (pool.runtime_dir / "lock").touch()
    Pool.destroy(two)
    assert list(two[0].parent.iterdir()) == []
    with refused(DeviceMissingError):
        Pool.open(two)


def test_damaged_pool_can_be_destroyed(pool: list[Path]) -> None:
    overwrite(pool[0], 64, b"\xff")
    Pool.destroy(pool)
    assert not pool[0].exists()


def test_destroy_leaves_a_sliced_file(shm: Path) -> None:
    file = shm / "file"
    file.touch()
    os.truncate(file, 16 * MIB)
    Pool.create([f"{file}@0+8MiB"]).close()
    Pool.create([f"{file}@8MiB+8MiB"]).close()
    Pool.destroy([f"{file}@0+8MiB"])
    assert file.stat().st_size == 16 * MIB
    with refused(DeviceForeignError):
        Pool.open([f"{file}@0+8MiB"])
    Pool.open([f"{file}@8MiB+8MiB"]).close()


def test_destroy_changes_nothing_if_one_device_is_foreign(pool: list[Path], shm: Path) -> None:
    (shm / "thesis").write_text("call me Ishmael")
    with refused(DeviceForeignError, "nothing was destroyed"):
        Pool.destroy([*pool, shm / "thesis"])
    assert (shm / "thesis").read_text() == "call me Ishmael"
    Pool.open(pool).close()


# ---- Each device is mapped once, as a whole: a pool of any size costs a mapping or two per
# device.


TIB = 1 << 40


def mapping_count(path: Path) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith(f" {path}") for line in lines)


def directory_for_tebibytes(*candidates: Path) -> Path:
    for candidate in candidates:
        probe = candidate / "probe"
        try:
            probe.touch()
            os.truncate(probe, TIB)
        except OSError:
            continue
        finally:
            probe.unlink(missing_ok=True)
        return candidate
    pytest.skip("no filesystem here takes sparse files of 1 TiB")


@needs_a_cpu("it keeps a word for each page that is mapped: 8 GiB per device")
@pytest.mark.parametrize("interleave", [True, False])
def test_eight_tebibytes_are_at_most_two_mappings_per_device(
    shm: Path, tmp_path: Path, interleave: bool
) -> None:
    directory = directory_for_tebibytes(shm, tmp_path)
    paths = [directory / f"huge.{index}" for index in range(8)]
    with Pool.create(
        paths, device_size=TIB, interleave=interleave, sparse=True, max_blocks=4096
    ) as made:
        assert made.geometry.size > 7.99 * TIB
    with Pool.open(paths) as pool:
        for offset in range(0, pool.geometry.size, TIB // 4):
            assert ffi.buffer(lib.bl_pool_address(pool.handle, offset), 8)[:] == bytes(8)
        counts = [mapping_count(path) for path in paths]
        assert all(1 <= count <= 2 for count in counts)
    assert sum(mapping_count(path) for path in paths) == 0


def test_a_process_maps_a_pool_once_however_often_it_opens_it(shm: Path) -> None:
    paths = [shm / "a", shm / "b"]
    made = Pool.create(paths, device_size=16 << 20, sparse=True)
    pools = [made, *(Pool.open(order) for order in (paths[::-1], paths))]
    assert [mapping_count(path) for path in paths] == [1, 1]
    assert len({pool.handle for pool in pools}) == 1
    pools[0].close()
    with pytest.raises(ValueError, match="closed"):
        pools[0].using()
    assert ffi.buffer(lib.bl_pool_address(pools[1].handle, 0), 8)[:]  # the others still use it
    with pools[1].using():
        for pool in pools[1:]:
            pool.close()
        assert [mapping_count(path) for path in paths] == [1, 1]
    assert [mapping_count(path) for path in paths] == [0, 0]
    with Pool.open(paths):
        assert [mapping_count(path) for path in paths] == [1, 1]


def test_a_recreated_pool_can_be_mapped_together_with_the_old_one(shm: Path) -> None:
    paths = [shm / "a"]
    with Pool.create(paths, device_size=16 << 20, sparse=True) as old:
        with Pool.create(paths, sparse=True, force=True) as new:
            assert old.handle != new.handle
            assert old.id != new.id
        with Pool.open(paths) as new:
            assert new.id != old.id
            assert old.handle != new.handle


def test_a_truncated_pool_is_rejected_although_it_is_mapped(shm: Path) -> None:
    path = shm / "a"
    with Pool.create([path], device_size=16 << 20, sparse=True):
        pass
    with Pool.open([path]):
        os.truncate(path, 8 << 20)
        with pytest.raises(DeviceTruncatedError):
            Pool.open([path])
        os.truncate(path, 16 << 20)


@needs_a_cpu("it leaves out MADV_DONTFORK")
def test_a_forked_child_maps_a_pool_again(shm: Path) -> None:
    path = shm / "a"

    def child() -> None:
        with Pool.open([path]):
            assert mapping_count(path) == 1
        assert mapping_count(path) == 0
        pool.close()

    with Pool.create([path], device_size=16 << 20, sparse=True) as pool:
        assert in_child(child) == "None"
        assert mapping_count(path) == 1


def test_threads_that_open_and_close_leave_nothing_mapped(shm: Path) -> None:
    path = shm / "a"
    Pool.create([path], device_size=16 << 20, sparse=True).close()

    def use(_: int) -> bytes:
        with Pool.open([path]) as pool, pool.using() as handle:
            return bytes(ffi.buffer(lib.bl_pool_address(handle, 0), 64))

    with ThreadPoolExecutor(8) as threads:
        superblocks = set(threads.map(use, range(400)))
    assert len(superblocks) == 1
    assert mapping_count(path) == 0


# ---- A closed pool releases all its descriptors and mappings.


FILE_SIZE = 16 * MIB


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    paths = [shm / "a", shm / "b"]
    Pool.create(paths, device_size=FILE_SIZE, sparse=True).close()
    return paths


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> WatchedCore:
    core = WatchedCore()
    for module in ("create", "layout", "mapping", "pool"):
        monkeypatch.setattr(f"beluga.pool.{module}.lib", core)
    return core


@pytest.mark.parametrize(
    "act",
    [
        lambda paths: Pool.open(paths).close(),
        survey,
        lambda paths: Pool.create(paths, sparse=True, force=True).close(),
        lambda paths: Pool.create(paths, sparse=True),
        lambda paths: Pool.create([f"{paths[0]}@0+8MiB"]).close(),
        lambda paths: Pool.create([paths[0].with_name("c")], device_size=FILE_SIZE).close(),
        Pool.destroy,
    ],
    ids=["open", "survey", "force", "refused", "slice", "new", "destroy"],
)
def test_no_descriptor_stays_open(paths: list[Path], act: Callable[[list[Path]], object]) -> None:
    before = open_files()
    with contextlib.suppress(PoolExistsError):
        act(paths)
    assert open_files() == before


def test_memory_is_unmapped_once_when_no_longer_used(paths: list[Path], core: WatchedCore) -> None:
    pool = Pool.open(paths)
    with pool.using():
        core.calls.clear()
        pool.close()
        pool.close()
        assert core.names() == []
    pool.close()
    assert core.names() == ["bl_pool_close", "bl_device_unmap", "bl_device_unmap"]
    with pytest.raises(ValueError, match="closed"):
        pool.using()


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOMEM, NoRoomError), (errno.EAGAIN, BlockingIOError)]
)
def test_a_device_that_cannot_be_mapped_leaves_nothing_mapped(
    paths: list[Path], core: WatchedCore, code: int, kind: type[Exception]
) -> None:
    maps: list[int] = []
    real = core.bl_device_map

    def second_fails(*arguments: Any) -> int:
        maps.append(0)
        return -code if len(maps) == 2 else int(real(*arguments))

    core.bl_device_map = second_fails  # type: ignore[attr-defined]
    before = open_files()
    with pytest.raises(kind):
        Pool.open(paths)
    assert core.names().count("bl_device_unmap") == 1
    assert open_files() == before


def test_a_pool_that_cannot_be_opened_leaves_nothing_mapped(
    paths: list[Path], core: WatchedCore
) -> None:
    core.fails["bl_pool_open"] = -errno.ENOMEM
    with pytest.raises((OSError, MemoryError, BelugaError)):
        Pool.open(paths)
    assert core.names().count("bl_device_unmap") == 2
    assert "bl_pool_close" not in core.names()


class User:
    """A thread or object that uses a pool."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self.name, self.ended = name, ended
        self.fails = False

    def end(self) -> None:
        if self.fails:
            raise KeyboardInterrupt
        self.ended.append(self.name)


def test_users_of_a_pool_end_before_it_in_reverse_order(
    paths: list[Path], core: WatchedCore
) -> None:
    pool = Pool.open(paths)
    ended: list[str] = []
    users = [User(name, ended) for name in "abc"]
    for user in users:
        pool.before_close(user.end)
    users[2].fails = True
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert "bl_pool_close" not in core.names()
    users[2].fails = False
    del users[1], user
    pool.close()
    assert ended == ["c", "a"]  # the one in between was collected
    assert core.names()[-3:] == ["bl_pool_close", "bl_device_unmap", "bl_device_unmap"]
    with pytest.raises(ValueError, match="closed"):
        pool.before_close(users[0].end)
    with pytest.raises(ValueError, match="closed"):
        _ = pool.handle


def test_only_allocated_pools_are_prefaulted(paths: list[Path], core: WatchedCore) -> None:
    with Pool.open(paths) as sparse:
        sparse.prefault()
    assert "bl_pool_prefault" not in core.names()
    with Pool.create([paths[0].with_name("c")], device_size=FILE_SIZE) as pool:
        pool.prefault()
        assert core.last("bl_pool_prefault") == (pool.handle, 0, pool.geometry.size)


def test_hosts_of_a_shared_device_require_numbers(paths: list[Path], tmp_path: Path) -> None:
    with Pool.open(paths) as files:
        assert (files.host_number(None), files.host_number(3)) == (0, 3)
    sysfs = fake_devdax(tmp_path, "/dev/zero", size=FILE_SIZE)
    with Pool(creation.create(["/dev/zero"], NewPoolSettings(), sysfs=sysfs)) as shared:
        assert shared.host_number(0) == 0
        with refused(DeviceSpecError, "--host N"):
            shared.host_number(None)
        assert [device.node for device in shared.devices] == [1]


def test_a_node_needs_no_free_space_but_a_following_file_does(
    shm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    demanded: list[int] = []
    monkeypatch.setattr(creation, "require_room", lambda size, _: demanded.append(size))
    sysfs = fake_devdax(tmp_path, "/dev/zero", size=FILE_SIZE)
    paths = ["/dev/zero", shm / "a", shm / "b"]
    creation.create(paths, NewPoolSettings(device_size=FILE_SIZE), sysfs=sysfs).close()
    assert demanded == [2 * FILE_SIZE]


def test_other_pools_in_a_file_are_found_wherever_they_lie(shm: Path) -> None:
    file = shm / "file"
    file.touch()
    os.truncate(file, 16 * FILE_SIZE)
    slices = [f"{file}@{at * SIZE}+{SIZE}" for at in (15, 7, 1)]
    for number, text in enumerate(slices):
        Pool.create([text], sparse=True).close()
        with refused(PoolExistsError, f"slice at {(15, 7, 1)[number] * SIZE:#x}"):
            Pool.create([file], sparse=True)
    for text in slices[:0:-1]:
        Pool.destroy([text])
    with refused(PoolExistsError, f"slice at {15 * SIZE:#x}"):
        Pool.create([f"{file}@{2 * MIB}+{16 * SIZE - 2 * MIB}"], sparse=True)
    Pool.create([f"{file}@0+{15 * SIZE}"], sparse=True).close()


def test_a_pool_without_settings_has_the_defaults(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_made: list[NewPoolSettings] = []

    def create(names: list[Path], settings: NewPoolSettings, **_: object) -> Any:
        settings_made.append(settings)
        return creation.create(names, NewPoolSettings(sparse=True, force=True))

    monkeypatch.setattr("beluga.pool.pool.create", create)
    with Pool.create(paths) as pool:
        assert pool.geometry.interleaved
    assert settings_made == [NewPoolSettings()]
    assert not (settings_made[0].sparse or settings_made[0].force)


def test_the_emulated_pool_has_two_files_of_its_user() -> None:
    folder = Path(f"/dev/shm/beluga-{os.getuid()}")
    assert emulated_paths() == [str(folder / "pool.0"), str(folder / "pool.1")]
