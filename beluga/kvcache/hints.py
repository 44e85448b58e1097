# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Hints of clients for the eviction of blocks (``csrc/index/hints.h``)."""

from __future__ import annotations

import dataclasses

from beluga._ffi import lib
from beluga.arguments import of_type, short
from beluga.errors import BadValueError

PRIORITIES = {
    "low": int(lib.BL_LEVEL_LOW),
    "normal": int(lib.BL_LEVEL_NORMAL),
    "high": int(lib.BL_LEVEL_HIGH),
}
"""The priorities of hints, with the levels that the server uses."""

_TTL_MAX_S = 30 * 86400


@dataclasses.dataclass(frozen=True, slots=True)
class HintResult:
    """The number of blocks that got a hint, of blocks refused beyond a budget, of keys that the
    pool does not have, and of leading blocks that the pool has or is fetching from lower tiers.
    """

    given: int
    refused: int
    absent: int
    fetched: int


def hint_level(priority: object, ttl: object, *, pin: object) -> tuple[int, int]:
    """Convert a hint to its level and its time in milliseconds. Raises BadTypeError and
    BadValueError.
    """
    of_type("priority", priority, str)
    of_type("pin", pin, bool)
    if priority not in PRIORITIES:
        raise BadValueError(
            f"the priority of a hint is {short(priority)}; give {', '.join(PRIORITIES)}"
        )
    if pin and priority == "low":
        raise BadValueError("a hint has both pin and low priority; give one of the two")
    milliseconds = 0
    if ttl is not None:
        of_type("ttl", ttl, int, float)
        if isinstance(ttl, bool) or not 0.001 <= ttl <= _TTL_MAX_S:  # type: ignore[operator]
            raise BadValueError(
                f"the ttl of a hint is {short(ttl)}; give seconds, from 0.001 to {_TTL_MAX_S}"
            )
        milliseconds = round(ttl * 1000)  # type: ignore[operator]
    return int(lib.BL_LEVEL_PINNED) if pin else PRIORITIES[str(priority)], milliseconds
