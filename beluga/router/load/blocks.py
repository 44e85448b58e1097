# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The distinct blocks that the active requests of one worker hold. A shared block counts once.

Blocks are identified by sequence hashes, each of which stands for its whole prefix. So the set of
held blocks is closed under prefixes, and reference counts never grow along a request; binary search
suffices for both (csrc/routing/active.c).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Container, Sequence

from beluga._ffi import core, ffi, lib
from beluga.errors import raise_for_status

# Holders of a block; above this number, a request holds it alone for less than 0.3 % of its time
_MOST = 4


def alone(holders: int) -> float:
    """Return the share of its time in which one more request is the only holder of a block.

    Let all requests run for an exponentially distributed time T. After t seconds each of the k
    holders has ended with probability u = 1 - exp(-t / T). If requests for the block arrive as
    often as they end, k * u of the later ones are active, and with probability exp(-k * u) none is.
    So the share is the integral of u**k * exp(-k * u) over u from 0 to 1, which has a closed form:
    1, 0.26, 0.08 and 0.03 for 0 to 3 holders.
    """
    if not holders:
        return 1.0
    none = math.exp(-holders) * sum(
        float(holders) ** j / math.factorial(j) for j in range(holders + 1)
    )
    return (1 - none) * math.factorial(holders) / float(holders) ** (holders + 1)


ALONE = ffi.new("double[]", [alone(holders) for holders in range(_MOST + 1)])
"""The values of ``alone`` for few holders, for C."""


def leading(chain: Sequence[int], held: Container[int]) -> int:
    """Return the number of leading elements of a chain in a set that is closed under prefixes."""
    if not chain or chain[0] not in held:
        return 0
    if chain[-1] in held:
        return len(chain)
    return bisect_left(range(len(chain)), True, key=lambda at: chain[at] not in held)


class ActiveBlocks:
    """The blocks of one worker's requests, as uint64 arrays."""

    def __init__(self) -> None:
        out = ffi.new("bl_active **")
        raise_for_status(lib.bl_active_create(out), "an account of blocks")
        self.handle: core.bl_active = ffi.gc(out[0], lib.bl_active_destroy)
        # For blocks with one holder: the difference of their weight from 1.
        self._faded: dict[int, float] = {}

    def __len__(self) -> int:
        """Return the number of distinct blocks, counting faded ones by their weight, rounded."""
        count = int(lib.bl_active_count(self.handle))
        return round(count - sum(self._faded.values())) if self._faded else count

    def add(self, sequence: array[int]) -> None:
        """Add a request's blocks."""
        blocks = ffi.from_buffer("uint64_t[]", sequence)
        raise_for_status(
            lib.bl_active_add(self.handle, blocks, len(sequence)), "a request's blocks"
        )
        if self._faded:
            for block in sequence:
                self._faded.pop(block, None)

    def remove(self, sequence: array[int]) -> None:
        """Remove a request's blocks."""
        lib.bl_active_remove(self.handle, ffi.from_buffer("uint64_t[]", sequence), len(sequence))
        if self._faded:
            for block in sequence:
                self._faded.pop(block, None)

    def fade(self, sequence: array[int], weight: float) -> None:
        """Set the weight (0 to 1) of the blocks that only this request holds, its exclusive
        suffix.
        """
        for block in reversed(sequence):
            if lib.bl_active_holders(self.handle, block) > 1:
                break
            self._faded[block] = 1 - weight
