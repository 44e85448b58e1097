# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tables with which the kernels compute CRC-32C (``csrc/cuda/crc32c.cuh``).

Polynomials over GF(2) modulo the Castagnoli polynomial, reflected: x^0 is the highest of 32 bits.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_POLYNOMIAL = np.uint32(0x82F63B78)
_WORD_SIZE = 16
_PART_SIZE = 4  # bytes of a part of a word; its checksum is its product with x^32


def multiply(a: Words | np.uint32, b: Words | np.uint32) -> Words:
    """Return the products of ``a`` and ``b``, which have one shape or are broadcast."""
    a, b = np.broadcast_arrays(np.asarray(a, np.uint32), np.asarray(b, np.uint32))
    product, b = np.zeros(a.shape, np.uint32), b.copy()
    for bit in range(31, -1, -1):
        product ^= b * ((a >> np.uint32(bit)) & np.uint32(1))
        b = (b >> np.uint32(1)) ^ (_POLYNOMIAL * (b & np.uint32(1)))
    return product


def powers(counts: NDArray[np.int64]) -> Words:
    """Return x^(8n) for each n of ``counts``, numbers of bytes below 2^32."""
    counts = np.asarray(counts, np.int64)
    found = np.full(counts.shape, 0x80000000, np.uint32)
    square = np.array(1 << 23, np.uint32)  # x^8
    while counts.any():
        found = np.where(counts & 1, multiply(found, square), found)
        square, counts = multiply(square, square), counts >> 1
    return found


@functools.cache
def tables(lanes: int) -> Words:
    """Return the tables for groups of ``lanes`` lanes: uint32 of shape (words,)."""
    byte = np.arange(256, dtype=np.uint32)
    placed = np.stack([byte << np.uint32(8 * k) for k in range(4)])
    factors = powers(np.array([lanes * _WORD_SIZE, _PART_SIZE]))
    words = powers(np.arange(32) * _WORD_SIZE + _PART_SIZE)
    by_bit = powers(1 << np.arange(32, dtype=np.int64))
    products = multiply(placed, factors[:, None, None])
    return np.concatenate([table.reshape(-1) for table in (products, words, by_bit)])
