# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""CRC-32C: published values, and every path against every other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import CRC_PATHS

from beluga import coherence
from beluga._ffi import lib

# RFC 3720, B.4, and the check value of the catalogues.
PUBLISHED = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "value"), PUBLISHED)
def test_checksums_match_published_values(crc_path: str, data: bytes, value: int) -> None:
    assert coherence.crc32c(data) == value


def by_bits(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    "size", [1, 7, 8, 255, 256, 257, 319, 320, 383, 384, 400, 3071, 3072, 7001]
)
def test_checksums_match_the_bitwise_definition(crc_path: str, size: int) -> None:
    data = bytes(i * 7 % 251 for i in range(size))
    assert coherence.crc32c(data) == by_bits(data)


@given(
    st.binary(max_size=600).flatmap(lambda seed: st.just((seed * 16)[:9000])),
    st.integers(0, 63),
    st.integers(0, 9000),
)
def test_all_paths_return_the_same_checksum_and_can_continue_one(
    data: bytes, start: int, cut: int
) -> None:
    data, before = data[start:], lib.bl_cpu_features()
    values = set()
    try:
        for mask, _ in CRC_PATHS.values():
            lib.bl_cpu_limit(mask)
            values.add(coherence.crc32c(data))
            values.add(coherence.crc32c(data[cut:], coherence.crc32c(data[:cut])))
    finally:
        lib.bl_cpu_limit(before)
    assert len(values) == 1
