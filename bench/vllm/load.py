# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The load of all arms: requests in two passes (the paper's Exp 5), and at a rate (Exp 6).

The first pass fills the pool, and the second one finds everything there. Between the passes and
before each rate every engine's own prefix cache is emptied. So vLLM alone computes each prompt, and
an arm with a pool loads it. A prefix that several requests share is computed or loaded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .dataset import Dataset
from .station import Station, in_turn
from .stream import Reply
from .summary import Row, arrivals, summary

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to every arm: ``at_once`` at a time, with ``max_tokens`` tokens in each
    answer.
    """

    stations: Sequence[Station]
    at_once: int
    max_tokens: int
    seed: int
    progress: Progress

    def warm_up(self, dataset: Dataset) -> None:
        """Have every engine compute these prompts once, which touches its memory."""
        for station in self.stations:
            before = station.figures()
            self._stream(station, dataset.prompts, at_once=1)
            station.wait(before, dataset.fresh_tokens)

    def two_passes(self, dataset: Dataset) -> list[Row]:
        """Return a row for every arm and pass. The arms take turns in each context."""
        return [row for number in (1, 2) for row in self._pass(dataset, number)]

    def at_rate(self, dataset: Dataset, rate_per_s: float) -> list[Row]:
        """Return a row for every arm. These requests, all in its pool, arrive at random at this
        rate.
        """
        due_s = arrivals(dataset.request_count, rate_per_s, self.seed)
        rows = []
        for station in self.stations:
            station.empty()
            reply = self._stream(station, dataset.shuffled(self.seed), due_s=due_s)
            row = _row(station, dataset, [reply]) | {"rate_per_s": rate_per_s}
            self.progress(f"{dataset.length} tokens, {rate_per_s:.2f}/s, {_brief(row)}")
            rows.append(row)
        return rows

    def _pass(self, dataset: Dataset, number: int) -> list[Row]:
        before = {}
        for station in self.stations:
            station.empty()
            before[station.name] = station.figures()
        replies: dict[str, list[Reply]] = {station.name: [] for station in self.stations}
        for turn, prompts in enumerate(dataset.contexts):
            for station in in_turn(self.stations, turn):
                replies[station.name].append(
                    self._stream(station, prompts, at_once=self.at_once),
                )
        rows = []
        for station in self.stations:
            station.wait(before[station.name], dataset.fresh_tokens if number == 1 else 0)
            row = _row(station, dataset, replies[station.name]) | {"pass": number}
            self.progress(f"{dataset.length} tokens, pass {number}, {_brief(row)}")
            rows.append(row)
        return rows

    def _stream(self, station: Station, prompts: list[list[int]], **how: Any) -> Reply:
        return station.stream(prompts, max_tokens=self.max_tokens, **how)


def _row(station: Station, dataset: Dataset, replies: Sequence[Reply]) -> Row:
    return {
        "arm": station.name,
        "length": dataset.length,
        "prompt_tokens": dataset.request_count * dataset.length,
        "full_tokens": dataset.full_tokens,
        "repeated_tokens": dataset.repeated_tokens,
        **summary(replies),
    }


def _brief(row: Row) -> str:
    return (
        f"{row['arm']}: {row['qps']:.2f} requests/s, first token after "
        f"{1000 * row['ttft_mean_s']:.0f} ms, {row['cached_tokens']} of {row['full_tokens']} cached"
    )
