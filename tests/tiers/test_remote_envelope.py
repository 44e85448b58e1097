# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The bytes of an object: anything other than the saved bytes is rejected."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote_blocks import blocks

from beluga.coherence import crc32c
from beluga.tiers.remote.tier import HEADER, WrongObjectError, name_of, pack, unpack

RECORDS, PAYLOAD = blocks([200])
KEY = RECORDS["key"][0]
OBJECT = bytes(pack(RECORDS[0], PAYLOAD[0]))


def forged(payload: bytes = b"", **fields: object) -> bytes:
    """Return an object whose header has other fields and matching checksums."""
    header = np.frombuffer(OBJECT[:64], HEADER).copy()
    for name, value in fields.items():
        (header["record"] if name in ("key", "length") else header)[name] = value
    header["payload_crc"] = crc32c(payload, crc32c(header["record"]["key"].tobytes()))
    header["crc"] = crc32c(header.tobytes()[:60])
    return header.tobytes() + payload


def test_the_format_of_an_object_is_frozen() -> None:
    """Tiers of other releases read it, so the format changes only with its version and name."""
    assert HEADER.itemsize == 64
    assert (OBJECT[:8], OBJECT[8:12], len(OBJECT)) == (b"BELUGAKV", b"\1\0\0\0", 264)
    assert OBJECT[16:48] == RECORDS[0].tobytes()
    assert OBJECT[12:16] == crc32c(OBJECT[64:], crc32c(KEY.tobytes())).to_bytes(4, "little")
    assert OBJECT[48:60] == bytes(12)
    assert OBJECT[60:64] == crc32c(OBJECT[:60]).to_bytes(4, "little")
    assert name_of(np.array([0x0123456789ABCDEF, 2], np.uint64)) == (
        "beluga-1/ef/efcdab89674523010200000000000000"
    )


def test_a_packed_block_is_unpacked() -> None:
    found = unpack(KEY, OBJECT)
    assert found.record == RECORDS[0]
    assert np.array_equal(found.payload, PAYLOAD[0])


def test_every_flipped_bit_is_found() -> None:
    for bit in range(len(OBJECT) * 8):
        damaged = bytearray(OBJECT)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WrongObjectError):
            unpack(KEY, bytes(damaged))


def test_every_other_length_is_found() -> None:
    for length in range(len(OBJECT)):
        with pytest.raises(WrongObjectError):
            unpack(KEY, OBJECT[:length])
    with pytest.raises(WrongObjectError):
        unpack(KEY, OBJECT + b"\0")


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "less than a header"),
        (forged(length=0, version=2), "another version"),
        (forged(length=0, magic=b"BELUGAKW"), "it is not a block"),
        (forged(length=0, key=KEY + np.uint64(1)), "another block"),
        (forged(b"abc", length=4), "3 bytes instead of 4"),
        (forged(b"abc", length=0xFFFFFFFF), "3 bytes instead of 4294967295"),
        (forged(b"abc", length=3)[:-1] + b"d", "payload is damaged"),
    ],
)
def test_an_object_with_matching_checksums_is_validated_too(contents: bytes, reason: str) -> None:
    with pytest.raises(WrongObjectError, match=reason):
        unpack(KEY, contents)


def test_a_payload_under_another_key_is_rejected() -> None:
    """A store that swaps two payloads is detected, although both are intact."""
    mixed = bytearray(forged(b"abc", length=3, key=KEY + np.uint64(1)))
    mixed[16:32] = KEY.tobytes()
    mixed[60:64] = crc32c(bytes(mixed[:60])).to_bytes(4, "little")
    with pytest.raises(WrongObjectError, match="payload is damaged"):
        unpack(KEY, bytes(mixed))


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda tail: OBJECT[:64] + tail))
def test_arbitrary_bytes_are_a_block_or_rejected(contents: bytes) -> None:
    with contextlib.suppress(WrongObjectError):
        assert contents == OBJECT or unpack(KEY, contents) is None
