# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool with a metadata device: where its bytes are, and what is refused."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from beluga._ffi import ffi, lib
from beluga.errors import DeviceMismatchError, NoRoomError, PoolError
from beluga.pool import Pool
from beluga.pool.layout import Geometry, Layout, NewPoolSettings

FOLDER = Path(__file__).parent
CSRC = FOLDER.parents[1] / "csrc"
MIB = 1 << 20
STRIPE = 2 * MIB
SIZE = 16 * MIB


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


def geometry(
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
        layout = geometry(device_count, stripes, **wish)
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
    layout = geometry(count, stripes, interleave=True, metadata=True, max_blocks=max_blocks)
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


def test_one_file_is_not_used_twice(files: tuple[Path, list[Path]]) -> None:
    with refused(DeviceMismatchError, str(files[1][0]), "the same memory"):
        made(files, metadata=files[1][0])
    assert not any(path.exists() for path in files[1])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda files: made(files, metadata=None, metadata_coherence="hardware"), ("--metadata",)),
        (lambda files: made((files[0], [])), ("no space for blocks",)),
        (lambda files: made(files, metadata_coherence="none"), ("no coherence mode 'none'",)),
        (
            lambda files: made(files, coherence=["software"] * 3),
            ("3 coherence modes for 2 devices",),
        ),
    ],
)
def test_impossible_settings_are_refused(
    files: tuple[Path, list[Path]],
    act: Callable[[tuple[Path, list[Path]]], Pool],
    words: tuple[str, ...],
) -> None:
    kind = DeviceMismatchError if "3 coherence" in words[0] else PoolError
    with refused(kind, *words):
        act(files)
    assert not files[0].exists()
