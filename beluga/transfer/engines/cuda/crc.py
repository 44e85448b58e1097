# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""CRC-32C as arithmetic on polynomials, so that kernels can sum a chunk in any order.

Polynomials over GF(2) modulo the Castagnoli polynomial, reflected: x^0 is the highest of 32 bits.
A message's sum without its inversions, moved over n bytes, is its product with x^(8n).
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_POLYNOMIAL = np.uint32(0x82F63B78)
_ONES = np.uint32(0xFFFFFFFF)
_ONE = np.uint32(0x80000000)
_SLICES = 16
_LOW = 1 << 16


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
    found: Words = _run(1)[counts % _LOW]
    if (counts >= _LOW).any():
        found = multiply(found, _run(_LOW)[counts // _LOW])
    return found


def blank(lengths: NDArray[np.int64]) -> Words:
    """Return the checksums of runs of zero bytes with these ``lengths``."""
    different, which = np.unique(lengths, return_inverse=True)  # most chunks have the same length
    return np.array([_blank(length) for length in different.tolist()], np.uint32)[which]


@functools.lru_cache(4096)
def _blank(length: int) -> int:
    return int(multiply(powers(np.array([length])), _ONES)[0] ^ _ONES)


@functools.cache
def tables(lanes: int) -> Words:
    """Return the table for ``csrc/cuda/crc32c.cuh``, for groups of ``lanes`` lanes."""
    byte = np.arange(256, dtype=np.uint32)
    slices = multiply(byte, powers(np.arange(1, _SLICES + 1))[:, None])
    placed = np.stack([byte << np.uint32(8 * k) for k in range(4)])
    advance = multiply(placed, powers(np.array([lanes * _SLICES])))
    words = powers(np.arange(32) * _SLICES)
    by_bit = powers(1 << np.arange(32, dtype=np.int64))
    return np.concatenate([part.reshape(-1) for part in (slices, advance, words, by_bit)])


@functools.cache
def _run(step: int) -> Words:
    """Return x^(8 * step * n) for n below 2^16, each half computed from the one before it."""
    power: Words = _ONE.reshape(1)
    base = np.array([_byte_power(step)], np.uint32)
    while len(power) < _LOW:
        power = np.concatenate([power, multiply(power, base)])
        base = multiply(base, base)
    return power


def _byte_power(count: int) -> np.uint32:
    """Return x^(8 * count), by squaring."""
    power, square = _ONE.reshape(1), np.array([1 << 23], np.uint32)  # x^8
    while count:
        if count & 1:
            power = multiply(power, square)
        square, count = multiply(square, square), count >> 1
    found: np.uint32 = power[0]
    return found
