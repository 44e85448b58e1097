# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A get for engines, which also removes damaged blocks.

A damaged block would otherwise be found, miss, and count as present when the engine stores it
again, forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from beluga.kvcache import GetResult, KVCache, Run


def fetch(
    cache: KVCache,
    keys: NDArray[np.uint8] | NDArray[np.uint64],
    targets: Sequence[Any] | Run,
    *,
    records: NDArray[np.void] | None = None,
) -> GetResult:
    """Fetch the leading blocks that the pool has undamaged. ``records`` are the locations of blocks
    that another session has pinned. Raises the errors of the cache.
    """
    result = cache.get(keys, targets, records=records)
    if result.mismatches and result.hits < len(keys):
        cache.remove(keys[result.hits : result.hits + 1])
    return result
