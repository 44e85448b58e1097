# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Computes the cost of a copy: its time on a link, in picoseconds, which are its tokens.

This is Seastar's model: an operation takes 1 / (operations per second), and its bytes take 1 /
(bytes per second). The copies of one second may not cost more than a second.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from beluga.errors import TransferError

PICOSECONDS = 10**12  # tokens that a link has per second; as in csrc/iosched/link.c


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one direction: bytes per second, and operations per second (0: they are free).

    Raises TransferError for impossible values.
    """

    bytes_per_s: int
    ops_per_s: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.ops_per_s < 0:
            raise TransferError(f"{self} is not a speed; bytes_per_s must be greater than 0")

    @property
    def operation_ps(self) -> float:
        """The cost of an operation apart from its bytes."""
        return PICOSECONDS / self.ops_per_s if self.ops_per_s else 0.0

    def tokens(self, sizes: ArrayLike, *, operations: int = 1) -> NDArray[np.uint64]:
        """Return the picoseconds that copies of ``sizes`` bytes take, each of ``operations``
        operations.

        0 bytes cost 0, because they do not use the link. Halves are rounded up, as in
        ``bl_price_tokens``: a bucket for two pieces must hold two pieces.
        """
        size = np.asarray(sizes, np.float64)
        fixed = operations * self.operation_ps
        taken = size * (PICOSECONDS / self.bytes_per_s) + fixed * (size > 0)
        return (taken + 0.5).astype(np.uint64)

    def longest(self, tokens: int, *, most: int = 16 << 20) -> int:
        """Return the largest power of two, up to ``most``, that costs at most ``tokens``."""
        size = most
        while size > 1 and int(self.tokens(size)) > tokens:
            size //= 2
        return size


def speed_of(value: Speed | int | dict[str, Any]) -> Speed:
    """Return a speed from bytes per second, or from the fields of one."""
    if isinstance(value, Speed):
        return value
    return Speed(**value) if isinstance(value, dict) else Speed(value)


# The speeds of the Beluga paper: a CXL adapter of 16 lanes, read and written by CPUs; a memory
# device.
READ_SPEED = Speed(46_200_000_000)
WRITE_SPEED = Speed(33_000_000_000)
DEVICE_SPEED = Speed(22_500_000_000)
