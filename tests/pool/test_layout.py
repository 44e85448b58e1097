# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Where the regions of a pool lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusal import refused

from beluga.errors import NoRoomError, PoolError
from beluga.pool.layout import Geometry, Layout, NewPoolSettings

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
        rest = following - (start + size)
        assert 0 <= rest < (STRIPE + 128 if following == g.data_offset else PAGE)
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
    with_one_more = g.extent_offset + 2 * (g.stripe_count + 1) * 64
    assert with_one_more > g.data_offset - STRIPE


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
