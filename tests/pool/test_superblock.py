# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A superblock is untrusted input: every kind of error has its own name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusal import refused

from beluga._ffi import ffi, lib
from beluga.errors import (
    DeviceForeignError,
    DeviceTruncatedError,
    FormatError,
    PoolError,
    SuperblockDamagedError,
)
from beluga.pool.device import Device, DeviceSpec
from beluga.pool.layout import (
    SUPERBLOCK_SIZE,
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
def test_any_changed_byte_is_detected(place: int, change: int) -> None:
    raw = bytearray(GOOD.raw)
    raw[place] ^= change
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
