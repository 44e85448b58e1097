# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Arithmetic of plans: ranges cut where fragments, chunks and stripes end, by array operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from beluga.errors import LayoutError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

STRIPE_SIZE = 2 << 20


def whole_numbers(values: ArrayLike, what: str) -> NDArray[np.int64]:
    """Return ``values`` as int64.

    A mask or fractions would be misinterpreted, so they raise :class:`~beluga.errors.LayoutError`,
    with ``what`` as the values' name.
    """
    try:
        found = np.asarray(values)
    except ValueError:
        raise LayoutError(f"{what} must be a list of whole numbers, not a list of lists") from None
    if found.dtype.kind not in "iu" and found.size:
        raise LayoutError(f"{what} must be whole numbers, not an array of {found.dtype}")
    return found.astype(np.int64, copy=False)


def first_places(numbers: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return the index in a sorted array at which each number occurs first."""
    new = np.empty(len(numbers), bool)
    new[:1] = True
    np.not_equal(numbers[1:], numbers[:-1], out=new[1:])
    return np.flatnonzero(new)


def cut_at(
    at: NDArray[np.int64], end: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut ranges at multiples of ``size``. Return the range, the start and the end of each part."""
    first, last = at // size, (end - 1) // size
    if (first == last).all():
        return np.arange(len(at)), at, end
    row, step = parts(last - first + 1)
    edge = (first[row] + step) * size
    return row, np.maximum(at[row], edge), np.minimum(end[row], edge + size)


def parts(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Enumerate parts, of which element i of a list has ``counts[i]``.

    Return two arrays of shape (parts,): the element of each part, and its number in that element.
    """
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def striped(pieces: NDArray[np.void]) -> NDArray[np.void]:
    """Cut the pieces that cross the end of a stripe at that end. They are few."""
    offset = pieces["offset"].view(np.int64)
    end = offset + pieces["length"]
    stripe = offset // STRIPE_SIZE
    counts = (end - 1) // STRIPE_SIZE - stripe + 1
    over = np.flatnonzero(counts > 1)
    if len(over) == 0:
        return pieces
    of, step = parts(counts[over])
    row = over[of]
    edge = (stripe[row] + step) * STRIPE_SIZE
    begin = np.maximum(offset[row], edge)
    where = (np.cumsum(counts) - counts)[row] + step
    cut = np.repeat(pieces, counts)
    cut["address"][where] += (begin - offset[row]).view(np.uint64)
    cut["offset"][where] = begin
    cut["length"][where] = np.minimum(end[row], edge + STRIPE_SIZE) - begin
    return cut
