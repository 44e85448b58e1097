# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The simulator's traces: columns of numbers, with blocks numbered from 0 on; and how a file was
read.

A block's number stands for its content and all blocks before it. Only whole blocks have numbers;
the tail of a prompt is always computed. What was guessed about a file is named with the option that
sets it, since a wrong guess changes every result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TraceError

_BAD_SHARE = 10  # at most one item in this many may be unreadable
TIME_UNITS = {"s": 1, "ms": 1000}  # units in a second: a quotient is rounded once, 0.001 twice


@dataclass(slots=True)
class Reading:
    """The options of a reader, and what it assumed and skipped."""

    path: Path
    form: str
    form_given: bool = False
    requested_unit: str | None = None  # one of TIME_UNITS
    time_unit: str | None = None  # the unit of numeric times; None if there are none
    time_guessed: bool = False
    block_tokens: int = 0
    block_given: bool = False
    block_note: str = ""  # where block_tokens comes from, if it was not given
    item_count: int = 0
    bad: list[str] = field(default_factory=list)  # items that cannot be read: their errors
    left_out: dict[str, int] = field(default_factory=dict)  # why, and how many

    def skip(self, source: str, why: str) -> None:
        """Leave out an item that cannot be read."""
        self.bad.append(f"{source}: {why}")

    def leave_out(self, why: str) -> None:
        """Leave out a valid item that is not a request."""
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def check(self) -> None:
        """Refuse a file if too many of its items cannot be read. Raises TraceError."""
        count = len(self.bad)
        if count == self.item_count > 0 or count > max(1, self.item_count // _BAD_SHARE):
            others = f" ({count} of {self.item_count} items cannot be read)" * (count > 1)
            raise TraceError(f"{self.bad[0]}{others}")

    def advise(self, error: str) -> str:
        """Return an error's text with the format's name, if that was guessed."""
        if self.form_given:
            return error
        return f"{error}; the format was guessed as {self.form}, set --format if that is wrong"

    def facts(self) -> dict[str, object]:
        """Return what ``str()`` shows, as JSON has it: each value, and whether it was guessed."""
        return {
            "file": self.path.name,
            "format": self.form,
            "format_guessed": not self.form_given,
            "time_unit": self.time_unit,
            "time_unit_guessed": self.time_guessed,
            "block_tokens": self.block_tokens,
            "block_tokens_guessed": not self.block_given,
            "block_tokens_note": "" if self.block_given else self.block_note,
            "left_out": self.left_out,
            "skipped": self.bad,
        }

    def __str__(self) -> str:
        parts = [f"format {self.form}{'' if self.form_given else ' (guessed; --format)'}"]
        if self.time_unit is not None:
            parts.append(
                f"times in {self.time_unit}{' (guessed; --time-unit)' * self.time_guessed}"
            )
        note = "" if self.block_given else f" ({self.block_note})"
        parts.append(f"blocks of {self.block_tokens} tokens{note}")
        parts += [f"left out {count}: {why}" for why, count in self.left_out.items()]
        if self.bad:
            parts.append(f"skipped {len(self.bad)} of {self.item_count} items: {self.bad[0]}")
        return f"{self.path.name}: {'; '.join(parts)}"


@dataclasses.dataclass(frozen=True, slots=True)
class TraceEntry:
    """A request as the reader of a format returns it."""

    arrival_s: float | None  # None if the format has no times
    input_tokens: int
    output_tokens: int
    # numbers of whole blocks with their prefixes; equal content has equal numbers
    blocks: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their arrival. ``ids`` has the blocks of all requests; those of
    request i begin at ``first[i]``.
    """

    name: str
    block_tokens: int
    arrival_s: list[float]
    input_tokens: list[int]
    output_tokens: list[int]
    first: list[int]
    count: list[int]
    ids: NDArray[np.uint32]
    id_count: int
    reading: Reading | None = None  # None unless it comes from a file

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """The seconds from the first arrival to the last."""
        return self.arrival_s[-1] - self.arrival_s[0]

    @property
    def ideal_hit_rate(self) -> float:
        """The share of all blocks, with tails, that an unlimited cache has, if requests run one
        after another.
        """
        whole = sum(self.count) - self.id_count
        return whole / sum(-(-tokens // self.block_tokens) for tokens in self.input_tokens)

    def blocks(self) -> list[list[int]]:
        """Return each request's block numbers."""
        flat = self.ids.tolist()
        return [flat[at : at + n] for at, n in zip(self.first, self.count, strict=True)]


def make_trace(
    name: str,
    block_tokens: int,
    prompts: Iterable[TraceEntry],
    rate: float,
    reading: Reading | None = None,
) -> Trace:
    """Make a trace of these prompts. Prompts without times arrive at random, ``rate`` per second.

    Raises TraceError if there are none, or if a prompt has no tokens.
    """
    listed = list(_timed(prompts, rate))
    if not listed:
        raise TraceError(f"{name} holds no requests")
    listed.sort(key=lambda timed: timed[0])
    for at, prompt in listed:
        if prompt.input_tokens <= 0 or prompt.output_tokens < 0 or not 0 <= at < 1e12:
            raise TraceError(
                f"{name}: a request at {at:g} s has {prompt.input_tokens} tokens in and "
                f"{prompt.output_tokens} out; remove it"
            )
    numbers: dict[int, int] = {}
    ids: list[int] = []
    counts = []
    for _, prompt in listed:
        whole = min(len(prompt.blocks), prompt.input_tokens // block_tokens)
        ids += [numbers.setdefault(block, len(numbers)) for block in prompt.blocks[:whole]]
        counts.append(whole)
    start = listed[0][0]
    return Trace(
        name=name,
        block_tokens=block_tokens,
        arrival_s=[at - start for at, _ in listed],
        input_tokens=[prompt.input_tokens for _, prompt in listed],
        output_tokens=[max(1, prompt.output_tokens) for _, prompt in listed],
        first=[0, *accumulate(counts)][:-1],
        count=counts,
        ids=np.array(ids or [0], np.uint32),
        id_count=len(numbers),
        reading=reading,
    )


def _timed(prompts: Iterable[TraceEntry], rate: float) -> Iterator[tuple[float, TraceEntry]]:
    chance = Random(0)  # noqa: S311  arrivals, not secrets
    now = 0.0
    for prompt in prompts:
        if prompt.arrival_s is None:
            now += chance.expovariate(rate)
        yield now if prompt.arrival_s is None else prompt.arrival_s, prompt
