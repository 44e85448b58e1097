# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The bytes of an object: a header of 64 bytes, and a block's payload.

====== ===== =======================================================================
offset bytes content
====== ===== =======================================================================
     0     8 magic: ``BELUGAKV``
     8     4 version of this header: 1
    12     4 CRC-32C of the payload, seeded with the CRC-32C of the key
    16    32 the block's record: key, fingerprint, length, chunk_size
    48    12 zero
    60     4 CRC-32C of the 60 bytes before
    64     n payload: ``length`` bytes, to the end of the object
====== ===== =======================================================================

All numbers are little-endian. Another version uses other object names.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from beluga.coherence import crc32c
from beluga.tiers.tier import BLOCK, StoredBlock

from .store import Contents

VERSION = 1
HEADER: np.dtype[np.void] = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("payload_crc", "<u4"),
        ("record", BLOCK),
        ("zero", "V12"),
        ("crc", "<u4"),
    ]
)
_MAGIC = b"BELUGAKV"
_CHECKED = HEADER.itemsize - 4


class WrongObjectError(Exception):
    """An object is not the one that was saved under its name."""


def name_of(key: NDArray[np.uint64]) -> str:
    """Return the object name of a key: a folder for the version, one of 256 subfolders, and 32
    digits.
    """
    digits = key.astype("<u8").tobytes().hex()
    return f"beluga-{VERSION}/{digits[:2]}/{digits}"


def pack(record: np.void, payload: NDArray[np.uint8]) -> memoryview:
    """Encode a block as an object. It is a copy: the payload may change afterwards."""
    length = int(record["length"])
    data = np.empty(HEADER.itemsize + length, np.uint8)
    data[HEADER.itemsize :] = payload[:length]
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["record"] = _MAGIC, VERSION, record
    header["payload_crc"] = crc32c(data[HEADER.itemsize :].data, crc32c(record["key"].tobytes()))
    header["crc"] = crc32c(header.view(np.uint8)[:_CHECKED].data)
    data[: HEADER.itemsize] = header.view(np.uint8)
    return data.data


def unpack(key: NDArray[np.uint64], contents: Contents) -> StoredBlock:
    """Decode the object that the store returned for the key.

    Raises WrongObjectError: the bytes are untrusted, because the store and every hop may change
    them.
    """
    data = np.frombuffer(contents, np.uint8)
    if data.size < HEADER.itemsize:
        raise WrongObjectError(f"it has {data.size} bytes, which is less than a header")
    header = data[: HEADER.itemsize].copy().view(HEADER)[0]
    record, payload = header["record"].copy(), data[HEADER.itemsize :]
    if header["magic"] != _MAGIC or header["version"] != VERSION:
        raise WrongObjectError("it is not a block, or one of another version")
    if header["crc"] != crc32c(data[:_CHECKED].data):
        raise WrongObjectError("its header is damaged")
    if not np.array_equal(record["key"], key):
        raise WrongObjectError("it is another block")
    if int(record["length"]) != payload.size:
        raise WrongObjectError(f"it has {payload.size} bytes instead of {record['length']}")
    if header["payload_crc"] != crc32c(payload.data, crc32c(record["key"].tobytes())):
        raise WrongObjectError("its payload is damaged")
    return StoredBlock(record, payload)
