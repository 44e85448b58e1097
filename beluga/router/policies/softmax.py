# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A random choice by cost: lower costs are likelier, depending on the temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random

from beluga.router.policies.pick import lowest


def draw(costs: Sequence[float], temperature: float, random: Random) -> int:
    """Return the index of a random cost. At temperature 0 it is the lowest, with random ties;
    otherwise Dynamo's softmax over costs scaled to 0..1: p_i ~ exp(-(cost_i - min) / ((max - min) *
    temperature)).
    """
    if temperature <= 0:
        return lowest(costs, random)
    least, most = min(costs), max(costs)
    if least == most:
        return random.randrange(len(costs))
    scale = (most - least) * temperature
    sums = list(accumulate(math.exp((least - cost) / scale) for cost in costs))
    sample = random.random() * sums[-1]
    return next(place for place, reached in enumerate(sums) if reached >= sample)
