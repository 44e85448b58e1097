# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A model of how space/extent.h finds stripes for a class: it tries every size and every place."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

PAGE, STRIPE, STRIPES_MAX, BLOCKS_MAX = 4096, 2 << 20, 64, 512

Run = tuple[int, int]  # first stripe, number of stripes


def blocks_in(block_size: int, stripes: int) -> int:
    return min(stripes * STRIPE // block_size, BLOCKS_MAX)


def waste(block_size: int, stripes: int) -> Fraction:
    return 1 - Fraction(blocks_in(block_size, stripes) * block_size, stripes * STRIPE)


@cache
def cell_size(block_size: int) -> int:
    sizes = range(1, STRIPES_MAX + 1)
    little = [n for n in sizes if waste(block_size, n) <= Fraction(1, 100)]
    return little[0] if little else min(sizes, key=lambda n: waste(block_size, n))


def cells(block_size: int, stripe_count: int) -> list[Run]:
    """Return all places of the class's grid that hold a block, free or not."""
    n = cell_size(block_size)
    runs = [(first, min(n, stripe_count - first)) for first in range(0, stripe_count, n)]
    return [run for run in runs if blocks_in(block_size, run[1])]


def free_runs(block_size: int, free: set[int]) -> list[Run]:
    """Return free stripes in a row that hold a block; those that the block fills best are first."""
    runs: list[Run] = []
    for stripe in sorted(free):
        if runs and sum(runs[-1]) == stripe and runs[-1][1] < STRIPES_MAX:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((stripe, 1))
    runs = [run for run in runs if blocks_in(block_size, run[1])]
    return sorted(runs, key=lambda run: waste(block_size, run[1]))
