# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The verdict: whether a run measured full hits of what was saved, with the same work in each
arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from .summary import Row


def verdict(passes: Sequence[Row], rates: Sequence[Row], variants: Sequence[Row]) -> dict[str, Any]:
    """Return the verdict. ``full_hits`` of each arm with a pool is true if every whole block of
    every request was cached in the second pass and at every rate. ``same_work`` is true if all arms
    had equally many requests, and tokens of prompts and answers. ``passed`` depends on these and on
    our own arm; a peer that evicts is only reported.
    """
    again = [row for row in passes if row["pass"] == 2] + list(rates)
    arms = dict.fromkeys(row["arm"] for row in again if row["arm"] != "plain")
    full = {
        arm: all(row["cached_tokens"] == row["full_tokens"] for row in again if row["arm"] == arm)
        for arm in arms
    }
    variants_full = all(row["hit_tokens"] == row["full_tokens"] for row in variants)
    variants_identical = all(row["outputs_identical"] for row in variants)
    same_work = _same_work(passes, "length", "pass") and _same_work(rates, "rate_per_s")
    return {
        "full_hits": full,
        "same_work": same_work,
        "variants_full_hits": variants_full,
        "variants_outputs_identical": variants_identical,
        "passed": full["beluga"] and same_work and variants_full and variants_identical,
    }


def _same_work(rows: Sequence[Row], *names: str) -> bool:
    def key(row: Row) -> list[Any]:
        return [row[name] for name in names]

    def work(row: Row) -> tuple[int, ...]:
        return row["requests"], row["prompt_tokens"], row["output_tokens"]

    groups = groupby(sorted(rows, key=key), key=key)
    return all(len({work(row) for row in group}) == 1 for _, group in groups)
