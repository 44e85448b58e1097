# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The ratio of our speed to the machine's limit, in interleaved pairs, so that other load slows
both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

NOISY_SPREAD = 0.25
"""The spread of the limit over the pairs, as a share of its median, above which it is noise."""


Once = Callable[[], None]


def rate(once: Once, count: int) -> float:
    """Return how often per second ``once`` runs, after one run that does not count."""
    once()
    before = time.perf_counter()
    for _ in range(count):
        once()
    return count / (time.perf_counter() - before)


@dataclass(frozen=True, slots=True)
class Ratio:
    """``ratio`` is the median over the pairs of ours / limit, both speeds; 1 is the limit.

    ``ratio_q1`` and ``ratio_q3`` are its quartiles. ``noisy`` means that the limit itself was not
    steady.
    """

    limit: float
    ours: float
    ratio: float
    ratio_q1: float
    ratio_q3: float
    noisy: bool


def compare(pairs: list[tuple[float, float]]) -> Ratio:
    """Compute the ratio of pairs (limit, ours) of speeds. There must be at least two."""
    limits = [limit for limit, _ in pairs]
    first, _, third = quantiles([ours / limit for limit, ours in pairs], n=4, method="inclusive")
    middle = median(limits)
    return Ratio(
        limit=middle,
        ours=median(ours for _, ours in pairs),
        ratio=median(ours / limit for limit, ours in pairs),
        ratio_q1=first,
        ratio_q3=third,
        noisy=max(limits) - min(limits) > NOISY_SPREAD * middle,
    )


def race(
    limit: Callable[[], float],
    ours: Callable[[], float],
    *,
    pair_count: int,
    retry_count: int,
) -> Ratio:
    """Run limit, ours, limit, ...; each returns its speed. While the limit is not steady,
    everything is repeated, at most ``retry_count`` times. The last result counts.
    """
    for attempt in range(retry_count + 1):
        results = compare([(limit(), ours()) for _ in range(pair_count)])
        if not results.noisy or attempt == retry_count:
            break
    return results
