# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The superblock and the layout of a pool, with and without a metadata device."""

import ctypes
import itertools
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refusal, refusals, refused

from beluga._ffi import ffi, lib
from beluga.errors import (
    DeviceForeignError,
    DeviceMismatchError,
    DeviceTruncatedError,
    FormatError,
    NoRoomError,
    PoolError,
    SuperblockDamagedError,
)
from beluga.pool import Pool
from beluga.pool.device import Device, DeviceSpec
from beluga.pool.layout import (
    SUPERBLOCK_SIZE,
    Geometry,
    Layout,
    NewPoolSettings,
    fault,
    read_first,
    validate,
    wipe_first,
)

# ---- The superblock and the layout of a pool.


SIZE = 16 << 20
GOOD = Layout(2, SIZE, NewPoolSettings()).superblock(1, "file")
DEVICE = Device(DeviceSpec(Path("/p")), "file", SIZE, True, ())
CHECKED = ffi.typeof("bl_superblock").fields


def forged(field: str, value: int) -> bytes:
    """Return GOOD with another value in a field and a corrected check."""
    raw = ffi.new("bl_superblock *")
    ffi.memmove(raw, GOOD.raw, SUPERBLOCK_SIZE)
    struct = raw.geometry if field.startswith("geometry.") else raw
    setattr(struct, field.removeprefix("geometry."), value)
    raw.check = lib.bl_crc32c(0, raw, dict(CHECKED)["check"].offset)
    return bytes(ffi.buffer(raw))


def test_a_superblock_is_read_as_it_was_written() -> None:
    assert validate(DEVICE, GOOD.raw) == GOOD
    assert (GOOD.device_index, GOOD.coherence, GOOD.sparse) == (1, "hardware", False)
    assert len(GOOD.pool_id) == 32
    assert GOOD.geometry.device_count == 2


@refusals(
    (lambda: validate(DEVICE, bytes(SUPERBLOCK_SIZE)), DeviceForeignError, "/p", "--create"),
    (
        lambda: validate(DEVICE, b"\x7fELF".ljust(SUPERBLOCK_SIZE, b"\1")),
        DeviceForeignError,
        "something other",
        "beluga pool create --force PATH",
    ),
    (
        lambda: validate(DEVICE, forged("version", 7)),
        FormatError,
        "format 7",
        f"{lib.BL_FORMAT_VERSION}",
    ),
    (lambda: validate(DEVICE, forged("format_hash", 1)), FormatError, "hash"),
    (
        lambda: validate(Device(DeviceSpec(Path("/p")), "file", SIZE - 4096, True, ()), GOOD.raw),
        DeviceTruncatedError,
        "16773120 bytes",
        "16777216",
    ),
    (lambda: geometry(1, 2 * STRIPE), NoRoomError, "4 MiB", "larger devices"),
    (lambda: geometry(1, 5 * MIB), PoolError, "--size; device_size", "not 5242880 bytes"),
)
def test_wrong_superblocks_and_sizes_are_refused(refusal: Refusal) -> None:
    refusal()


def test_text_mode_copy_is_refused() -> None:
    with pytest.raises(PoolError):
        validate(DEVICE, GOOD.raw.replace(b"\r\n", b"\n").ljust(SUPERBLOCK_SIZE, b"\0"))


@given(st.integers(12, SUPERBLOCK_SIZE - 1), st.integers(1, 255))
def test_any_changed_byte_is_detected(offset: int, change: int) -> None:
    raw = bytearray(GOOD.raw)
    raw[offset] ^= change
    with refused(SuperblockDamagedError, "--force"):
        validate(DEVICE, bytes(raw))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device_index", 2),
        ("coherence", 0),
        ("coherence", 3),
        ("sparse", 2),
        ("header_size", 128),
        ("stripe_size", 1 << 20),
        ("geometry.device_count", 0),
        ("geometry.device_count", 65),
        ("geometry.device_size", SIZE + 4096),
        ("geometry.device_size", (1 << 63)),
        ("geometry.interleaved", 3),  # of a pool without metadata device
        ("geometry.interleaved", 4),
        ("geometry.lane_count", 0),
        ("geometry.slot_count", 63),
        ("geometry.bulk_size", 1),
        ("geometry.block_count_max", 1 << 30),
        ("geometry.size", SIZE),
        ("geometry.session_offset", 0),
        ("geometry.lane_offset", 0),
        ("geometry.lane_stride", 64),
        ("geometry.table_offset", 1 << 50),
        ("geometry.extent_offset", 0),
        ("geometry.data_offset", 0),
        ("geometry.stripe_count", 1 << 40),
    ],
)
def test_inconsistent_fields_are_rejected(field: str, value: int) -> None:
    raw = forged(field, value)
    assert fault(raw) == lib.BL_SUPERBLOCK_GEOMETRY
    with refused(SuperblockDamagedError):
        validate(DEVICE, raw)


def test_devdax_superblock_is_read_and_wiped_through_a_mapping(shm: Path) -> None:
    file = shm / "device"
    file.write_bytes(GOOD.raw.ljust(SIZE, b"\xaa"))
    device = Device(DeviceSpec(file), "devdax", SIZE, True, ())
    with file.open("r+b") as opened:
        assert validate(device, read_first(device, opened.fileno())) == GOOD
        wipe_first(device, opened.fileno())
    assert file.read_bytes() == bytes(SUPERBLOCK_SIZE).ljust(SIZE, b"\xaa")


STRIPE = 2 << 20
PAGE = 4096
MIB = 1 << 20


def geometry(
    device_count: int, device_size: int, settings: NewPoolSettings | None = None
) -> Geometry:
    return (
        Layout(device_count, device_size, settings or NewPoolSettings())
        .superblock(0, "file")
        .geometry
    )


settings = st.builds(
    NewPoolSettings,
    interleave=st.booleans(),
    max_blocks=st.integers(1, 1 << 20),
    lane_count=st.integers(1, 200),
    slot_count=st.sampled_from([4, 64, 256, 1024]),
    bulk_size=st.integers(1, 64).map(lambda pages: pages * PAGE),
)


@given(st.integers(1, 64), st.integers(2, 4096), settings)
def test_regions_follow_each_other_and_fill_the_pool(
    device_count: int, stripes: int, wish: NewPoolSettings
) -> None:
    try:
        g = geometry(device_count, stripes * STRIPE, wish)
    except NoRoomError:
        return
    assert g.size == device_count * (stripes - 1) * STRIPE
    starts = [g.session_offset, g.lane_offset, g.table_offset, g.name_offset]
    starts += [g.extent_offset, g.data_offset]
    assert all(start % PAGE == 0 for start in [*starts, g.lane_stride])
    sizes = [
        2 * g.lane_count * 64,
        g.lane_count * g.lane_stride,
        2 * g.block_count_max * 64,
        2 * g.block_count_max * 64,
        2 * g.stripe_count * 64,
    ]
    for start, size, following in zip(starts, sizes, starts[1:], strict=False):
        unused = following - (start + size)
        assert 0 <= unused < (STRIPE + 128 if following == g.data_offset else PAGE)
    lane_size = PAGE + 3 * g.slot_count * 128 + 3 * g.bulk_size
    assert 0 <= g.lane_stride - lane_size < PAGE
    assert g.data_offset % STRIPE == 0
    assert g.data_offset + g.data_size == g.size


@given(st.integers(2, 4096), settings)
def test_no_stripe_is_reserved_for_metadata_needlessly(stripes: int, wish: NewPoolSettings) -> None:
    try:
        g = geometry(1, stripes * STRIPE, wish)
    except NoRoomError:
        return
    end_with_more = g.extent_offset + 2 * (g.stripe_count + 1) * 64
    assert end_with_more > g.data_offset - STRIPE


@pytest.mark.parametrize("size", [256 * MIB, 300 * MIB, 510 * MIB, 512 * MIB, 1 << 30, 4 << 30])
@pytest.mark.parametrize("device_count", [1, 2, 3])
def test_metadata_of_default_pools_is_small(size: int, device_count: int) -> None:
    g = geometry(device_count, -(-size // device_count // STRIPE) * STRIPE)
    assert g.data_offset <= (0.025 if g.size < 768 * MIB else 0.012) * g.size


def test_block_table_has_a_line_per_256_kib() -> None:
    assert geometry(2, 4 << 30).block_count_max == (8 << 30) // (256 << 10)
    assert geometry(1, 8 * MIB).block_count_max == 1024


def test_smallest_pool_has_a_data_stripe() -> None:
    assert geometry(1, 3 * STRIPE).stripe_count == 1


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (NewPoolSettings(slot_count=100), "slot_count is a power of two, not 100"),
        (NewPoolSettings(slot_count=2048), "slot_count is from 4 to 1024, not 2048"),
        (NewPoolSettings(slot_count=2), "slot_count is from 4 to 1024, not 2"),
        (NewPoolSettings(slot_count=0), "slot_count is from 4 to 1024, not 0"),
        (NewPoolSettings(bulk_size=5000), "bulk_size) is a multiple of 4096, not 5000"),
        (
            NewPoolSettings(bulk_size=128 * MIB),
            "bulk_size) is from 4096 to 67108864, not 134217728",
        ),
        (NewPoolSettings(lane_count=5000), "--lanes (lane_count) is from 1 to 4096, not 5000"),
        (NewPoolSettings(lane_count=0), "--lanes (lane_count) is from 1 to 4096, not 0"),
        (NewPoolSettings(lane_count=-1), "--lanes (lane_count) is from 1 to 4096, not -1"),
        (NewPoolSettings(max_blocks=1 << 32), "--max-blocks (max_blocks) is from 1 to 4294967295"),
        (NewPoolSettings(max_blocks=0), "--max-blocks (max_blocks) is from 1 to 4294967295, not 0"),
        (NewPoolSettings(block_bytes=0), "--block-bytes (block_bytes) is from 64 to"),
        (NewPoolSettings(block_bytes=1), "--block-bytes (block_bytes) is from 64 to"),
    ],
)
def test_impossible_parameters_are_rejected_by_name(wish: NewPoolSettings, text: str) -> None:
    with refused(PoolError, text):
        geometry(2, 1 << 30, wish)


# ---- A pool with a metadata device: where its bytes are, and what is refused.


FOLDER = Path(__file__).parent
CSRC = FOLDER.parents[1] / "csrc"


@dataclass(frozen=True)
class Placement:
    """The placement of a pool's bytes, counted stripe by stripe: an independent model."""

    geometry: Geometry

    def stripes(self) -> list[tuple[int, int]]:
        """Return the device and the stripe in it of each stripe of the linear range."""
        g = self.geometry
        meta = g.data_offset // STRIPE if g.metadata_device else 0
        metadata = [(0, 1 + number) for number in range(meta)]
        devices = range(1 if g.metadata_device else 0, g.device_count)
        rows = range(1, g.device_size // STRIPE)
        if g.interleaved:
            return metadata + [(device, row) for row in rows for device in devices]
        return metadata + [(device, row) for device in devices for row in rows]


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of ``placed.c``."""
    library = tmp_path_factory.mktemp("placed") / "placed.so"
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-DBL_FORMAT_HASH=0ull", f"-I{CSRC}"]
    command = ["gcc", *flags, str(FOLDER / "placed.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    functions = ctypes.CDLL(str(library))
    functions.offset_of.restype = functions.size_of.restype = ctypes.c_uint64
    return functions


def geometry_of(
    device_count: int, stripes: int, *, interleave: bool, metadata: bool, max_blocks: int
) -> Geometry:
    wish = NewPoolSettings(interleave=interleave, max_blocks=max_blocks, lane_count=3)
    return Layout(device_count, stripes * STRIPE, wish, metadata_device=metadata).geometry


def raw(layout: Geometry) -> ctypes.Array[ctypes.c_char]:
    """Return the ``bl_geometry`` with the fields that the arithmetic uses."""
    c = ffi.new("bl_geometry *")
    c.device_count, c.device_size = layout.device_count, layout.device_size
    c.data_offset = layout.data_offset
    c.interleaved = layout.interleaved + 2 * layout.metadata_device
    data = bytes(ffi.buffer(c))
    return ctypes.create_string_buffer(data, len(data))


@given(
    st.integers(1, 9),
    st.integers(3, 40),
    st.fixed_dictionaries(
        {
            "interleave": st.booleans(),
            "metadata": st.booleans(),
            "max_blocks": st.integers(1, 50_000),
        }
    ),
)
def test_every_byte_has_one_place_and_comes_back(
    arithmetic: ctypes.CDLL, device_count: int, stripes: int, wish: dict[str, int]
) -> None:
    try:
        layout = geometry_of(device_count, stripes, **wish)
    except NoRoomError:
        assert not wish["metadata"]
        return
    c = raw(layout)
    expected_at = Placement(layout).stripes()
    assert len(expected_at) == layout.size // STRIPE
    assert len(set(expected_at)) == len(expected_at)
    device, at = ctypes.c_uint64(), ctypes.c_uint64()
    for stripe, expected in enumerate(expected_at):
        inside = stripe * 4160 % STRIPE
        offset = ctypes.c_uint64(stripe * STRIPE + inside)
        arithmetic.place(c, offset, ctypes.byref(device), ctypes.byref(at))
        assert (device.value, at.value) == (expected[0], expected[1] * STRIPE + inside)
        assert arithmetic.offset_of(c, device, at) == offset.value
    sizes = [arithmetic.size_of(c, ctypes.c_uint64(i)) for i in range(layout.device_count)]
    assert sizes == [layout.device_size_of(i) for i in range(layout.device_count)]
    last = dict.fromkeys(range(layout.device_count), 0)
    for number, row in expected_at:
        last[number] = max(last[number], row)
    assert sizes == [(1 + row) * STRIPE for row in last.values()]
    data = np.arange(layout.data_offset, layout.size, STRIPE, dtype=np.int64) + 64
    assert layout.devices_of(data).tolist() == [
        device for device, _ in expected_at[layout.data_offset // STRIPE :]
    ]


@given(st.integers(1, 63), st.integers(2, 5000), st.integers(1, 1 << 22))
def test_the_data_devices_have_data_alone(count: int, stripes: int, max_blocks: int) -> None:
    layout = geometry_of(count, stripes, interleave=True, metadata=True, max_blocks=max_blocks)
    assert layout.stripe_count == count * (stripes - 1)
    end = layout.extent_offset + 2 * 64 * layout.stripe_count
    # One stripe is left for the tests of the device's memory.
    assert STRIPE <= layout.data_offset - end < 2 * STRIPE
    assert layout.size == layout.data_offset + layout.data_size


@pytest.fixture
def files(shm: Path) -> tuple[Path, list[Path]]:
    """Paths for a metadata device and two data devices; the files do not exist."""
    return shm / "metadata", [shm / "a", shm / "b"]


def made(files: tuple[Path, list[Path]], **settings: object) -> Pool:
    metadata, data = files
    given = {"device_size": SIZE, "sparse": True, "metadata": metadata, **settings}
    return Pool.create(data, **given)  # type: ignore[arg-type]


def test_metadata_lies_on_its_device_and_data_on_the_others(
    files: tuple[Path, list[Path]],
) -> None:
    with made(files, metadata_coherence="hardware", coherence="software") as pool:
        assert [device.path for device in pool.devices] == [files[0], *files[1]]
        assert [device.holds for device in pool.devices] == ["metadata", "data", "data"]
        modes = ["hardware", "software", "software"]
        assert [device.coherence for device in pool.devices] == modes
        assert [device.path for device in pool.data_devices] == files[1]
        sizes = [path.stat().st_size for path in (files[0], *files[1])]
        assert sizes == [device.size for device in pool.devices]
        assert sizes == [pool.geometry.data_offset + STRIPE, SIZE, SIZE]
        for index, device in enumerate(pool.devices):
            start, end = int(ffi.cast("uintptr_t", lib.bl_pool_device(pool.handle, index))), 0
            for offset in range(0, pool.geometry.size, STRIPE):
                address = int(ffi.cast("uintptr_t", lib.bl_pool_address(pool.handle, offset)))
                if start <= address < start + device.size:
                    assert (offset < pool.geometry.data_offset) == (index == 0)
                    end += STRIPE
            assert end == device.size - STRIPE


def test_devices_are_named_in_any_order(files: tuple[Path, list[Path]]) -> None:
    with made(files) as pool:
        identity = pool.id
    for order in itertools.permutations([files[0], *files[1]]):
        with Pool.open(order) as opened:
            assert opened.id == identity
            assert opened.devices[0].path == files[0]
    Pool.destroy([files[1][1], files[0], files[1][0]])
    assert not any(path.exists() for path in (files[0], *files[1]))


@pytest.mark.parametrize(
    ("metadata", "data", "one_host"),
    [
        ("hardware", "software", False),
        ("hardware", "hardware", True),
        ("software", "hardware", True),
        ("software", "software", False),
        ("hardware", ["software", "hardware"], True),
    ],
)
def test_a_pool_is_for_one_host_if_a_data_device_is(
    files: tuple[Path, list[Path]], metadata: str, data: str | list[str], one_host: bool
) -> None:
    with made(files, metadata_coherence=metadata, coherence=data) as pool:
        assert pool.one_host is one_host


def test_the_default_coherence_is_that_of_the_kind(
    files: tuple[Path, list[Path]],
) -> None:
    with made(files) as pool:
        assert pool.devices[0].coherence == "hardware"
    wish = NewPoolSettings()
    layout = Layout(2, SIZE, wish, metadata_device=True)
    assert layout.superblock(0, "devdax").coherence == "software"
    declared = NewPoolSettings(metadata_coherence="hardware")
    devices = [
        Layout(1, SIZE, declared, metadata_device=True).superblock(i, "devdax") for i in (0, 1)
    ]
    assert [device.coherence for device in devices] == ["hardware", "software"]


def test_missing_metadata_device_is_named(files: tuple[Path, list[Path]]) -> None:
    made(files).close()
    with refused(DeviceMismatchError, "3 devices", "device 0 ", "is its metadata device"):
        Pool.open(files[1])
    with refused(DeviceMismatchError, "device 2 (counted from 0) is not named"):
        Pool.open([files[0], files[1][0]])


def test_a_slice_that_is_too_small_is_refused_with_the_required_size(
    files: tuple[Path, list[Path]], shm: Path
) -> None:
    whole = shm / "whole"
    whole.write_bytes(bytes(64 * MIB))
    with made(files) as pool:
        required = pool.devices[0].size // MIB
    Pool.destroy([files[0], *files[1]])
    small = f"{whole}@0+{required - 2}MiB"
    with refused(NoRoomError, f"has {required - 2} MiB", f"takes {required} MiB", "larger device"):
        made(files, metadata=small)
    assert not any(path.exists() for path in files[1])
    assert whole.read_bytes() == bytes(64 * MIB)
    with made(files, metadata=f"{whole}@0+{required}MiB") as pool:
        assert pool.devices[0].size == required * MIB


@refusals(
    (lambda files: made(files, metadata=None, metadata_coherence="hardware"), PoolError, "--meta"),
    (lambda files: made((files[0], [])), PoolError, "no space for blocks"),
    (lambda files: made(files, metadata_coherence="none"), PoolError, "no coherence mode 'none'"),
    (lambda files: made(files, metadata=files[1][0]), DeviceMismatchError, "the same memory"),
    (
        lambda files: made(files, coherence=["software"] * 3),
        DeviceMismatchError,
        "3 coherence modes for 2 devices",
    ),
)
def test_impossible_settings_are_refused(files: tuple[Path, list[Path]], refusal: Refusal) -> None:
    refusal(files)
    assert not any(path.exists() for path in (files[0], *files[1]))
