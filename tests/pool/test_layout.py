# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The superblock and the layout of a pool."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from beluga._ffi import ffi, lib
from beluga.errors import (
    DeviceForeignError,
    DeviceTruncatedError,
    FormatError,
    NoRoomError,
    PoolError,
    SuperblockDamagedError,
)
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


def test_empty_device_is_refused() -> None:
    with refused(DeviceForeignError, "/p", "--create"):
        validate(DEVICE, bytes(SUPERBLOCK_SIZE))


def test_foreign_device_is_refused() -> None:
    with refused(DeviceForeignError, "something other"):
        validate(DEVICE, b"\x7fELF".ljust(SUPERBLOCK_SIZE, b"\1"))


def test_text_mode_copy_is_refused() -> None:
    with pytest.raises(PoolError):
        validate(DEVICE, GOOD.raw.replace(b"\r\n", b"\n").ljust(SUPERBLOCK_SIZE, b"\0"))


def test_other_version_is_refused() -> None:
    with refused(FormatError, "format 7", f"{lib.BL_FORMAT_VERSION}"):
        validate(DEVICE, forged("version", 7))


def test_a_foreign_device_names_the_command_with_force() -> None:
    with refused(DeviceForeignError, "beluga pool create --force PATH"):
        validate(DEVICE, b"x" * SUPERBLOCK_SIZE)


def test_other_format_hash_is_refused() -> None:
    with refused(FormatError, "hash"):
        validate(DEVICE, forged("format_hash", 1))


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


def test_short_device_is_refused() -> None:
    short = Device(DeviceSpec(Path("/p")), "file", SIZE - 4096, True, ())
    with refused(DeviceTruncatedError, "16773120 bytes", "16777216"):
        validate(short, GOOD.raw)


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


def test_pool_without_a_data_stripe_is_refused() -> None:
    with refused(NoRoomError, "4 MiB", "larger devices"):
        geometry(1, 2 * STRIPE)


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


def test_sizes_that_are_not_whole_stripes_are_refused() -> None:
    with refused(PoolError, "--size; device_size", "not 5242880 bytes"):
        geometry(1, 5 * MIB)
