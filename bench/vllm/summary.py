# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The summary of a number of requests: requests per second, and the times that users see."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from .stream import Reply

Row = dict[str, Any]


def summary(replies: Sequence[Reply]) -> Row:
    """Summarize replies of the engine's ``stream`` in the fields that every row of passes and rates
    has.

    ``ttft`` is in seconds from sending to the first token, ``tpot`` from one token to the next. A
    percentile of few requests is close to the slowest one.
    """
    outputs = [output for reply in replies for output in reply["outputs"]]
    elapsed_s = sum(reply["elapsed_s"] for reply in replies)
    ttfts = [output["ttft_s"] for output in outputs]
    tpots = [output["tpot_s"] for output in outputs if output["tpot_s"] is not None]
    return {
        "requests": len(outputs),
        "elapsed_s": elapsed_s,
        "qps": len(outputs) / elapsed_s,
        **_spread("ttft", ttfts),
        **_spread("tpot", tpots),
        "cached_tokens": sum(output["cached_tokens"] for output in outputs),
        "output_tokens": sum(len(output["tokens"]) for output in outputs),
        "load_s": sum(reply["figures"].get("load_s", 0) for reply in replies),
        "load_bytes": sum(reply["figures"].get("load_bytes", 0) for reply in replies),
        "ttfts_s": ttfts,
    }


def _spread(name: str, values: Sequence[float]) -> Row:
    if not values:
        return {f"{name}_mean_s": None, f"{name}_p99_s": None}
    p99 = np.percentile(values, 99)
    return {f"{name}_mean_s": float(np.mean(values)), f"{name}_p99_s": float(p99)}


def arrivals(count: int, rate_per_s: float, seed: int) -> list[float]:
    """Return arrival times with the gaps of a Poisson process, in seconds after the first."""
    gaps = random.Random(seed)  # noqa: S311  repeatable, no secret
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + gaps.expovariate(rate_per_s))
    return times[:count]
