# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Converts hashes to uint64 arrays for C."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from beluga.errors import EventError

U64 = (1 << 64) - 1


def words(values: Iterable[int]) -> array[int]:
    """Convert hashes for C. Negative values are reinterpreted as unsigned 64 bits.

    Raises EventError for a value that is not a number.
    """
    if isinstance(values, array) and values.typecode == "Q":
        return values
    listed = values if isinstance(values, list | tuple) else list(values)
    try:
        return array("Q", listed)
    except (OverflowError, TypeError):
        pass
    try:
        return array("Q", [value & U64 for value in listed])
    except TypeError:
        raise EventError("a KV event has a hash that is not a number") from None
