# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The simulator's traces: columns of numbers, with blocks numbered from 0 on.

A block's number stands for its content and all blocks before it. Only whole blocks have numbers;
the tail of a prompt is always computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from random import Random

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TraceError
from beluga.simulate.reading import Reading


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
