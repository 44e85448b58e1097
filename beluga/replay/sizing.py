# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The size of a pool that holds all blocks of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beluga.choices import REPLAY_SIZE_MAX
from beluga.errors import ReplayError
from beluga.pool import STRIPE_SIZE, show_size
from beluga.replay.trace import TraceRequest, unique_count

DEVICE_COUNT = 2

_PAGE_SIZE = 4096
_LANE_COUNT_MIN = 16
_LANE_SIZE = 512 << 10  # more than the default size of a lane's slots and bulk areas
_TABLE_LINES_SIZE = 2 * 64  # one entry in each half
_SPARE_STRIPES = 4


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Arguments of ``Pool.create``. Sizes are in bytes."""

    device_size: int
    block_count_max: int
    lane_count: int

    @property
    def total_size(self) -> int:
        """The size of all devices together."""
        return self.device_size * DEVICE_COUNT


def pool_size_for(
    requests: Sequence[TraceRequest],
    block_size: int,
    wanted_size: int | None,
    *,
    session_count: int = 1,
) -> PoolSize:
    """Return the least size that holds every block, or a pool of ``wanted_size`` bytes if that is
    given. Raises ReplayError if that is too small, or if the blocks need more than a pool can have.
    """
    block_count, lane_count = unique_count(requests) + 1024, max(_LANE_COUNT_MIN, session_count)
    if wanted_size is not None:
        device_size = wanted_size // DEVICE_COUNT // STRIPE_SIZE * STRIPE_SIZE
        least = (lane_count * _LANE_SIZE + block_count * _TABLE_LINES_SIZE) // STRIPE_SIZE + 8
        if wanted_size < least * STRIPE_SIZE:
            raise ReplayError(
                f"a pool of {show_size(wanted_size)} has no room for its tables and a few blocks; "
                f"give at least {show_size(least * STRIPE_SIZE)}"
            )
        return PoolSize(device_size, block_count, lane_count)
    chunks_size = block_size // 4096  # an upper bound for the checksums
    stored_size = -(-(block_size + chunks_size) // _PAGE_SIZE) * _PAGE_SIZE
    size = block_count * (stored_size + _TABLE_LINES_SIZE) + lane_count * _LANE_SIZE
    stripe_count = size // DEVICE_COUNT // STRIPE_SIZE + 1 + _SPARE_STRIPES
    found = PoolSize(stripe_count * STRIPE_SIZE, block_count, lane_count)
    if found.total_size > REPLAY_SIZE_MAX:
        raise ReplayError(
            f"{block_count:,} blocks of {show_size(block_size)} do not fit into a pool, which has "
            f"at most {show_size(REPLAY_SIZE_MAX)}; give a smaller --block-bytes"
        )
    return found
