# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks for tests of the disk tier, whose bytes are derived from their keys."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from beluga.tiers import BLOCK, StoredBlock

MIB = 1 << 20


def keys_of(numbers: Iterable[int]) -> NDArray[np.uint64]:
    rows = [(number, number ^ 0xABCDEF) for number in numbers]
    return np.array(rows, np.uint64).reshape(-1, 2)


def records_of(numbers: Iterable[int], length: int) -> NDArray[np.void]:
    keys = keys_of(numbers)
    records = np.zeros(len(keys), BLOCK)
    records["key"] = keys
    records["fingerprint"] = 7
    records["length"] = length
    records["chunk_size"] = 16384
    return records


def payload_of(numbers: Iterable[int], length: int) -> NDArray[np.uint8]:
    rows = [np.random.default_rng(number).bytes(length) for number in numbers]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, length)


def is_block(block: StoredBlock | None, number: int) -> bool:
    """Whether this is the block of that number, with correct bytes."""
    if block is None:
        return False
    length = int(block.record["length"])
    return (
        block.record["key"].tolist() == keys_of([number])[0].tolist()
        and len(block.payload) == length
        and bytes(block.payload) == np.random.default_rng(number).bytes(length)
    )
