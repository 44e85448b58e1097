# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tokens that sparse attention reads, and their runs (the paper's Table 6, Exp 10)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SELECTED = 16
"""How many tokens are read at a time."""

_ALONE_IN_50 = (8, 50)
"""Of 50 selections, 8 have 11 single tokens and the others 12, which is 74 % of all."""


@dataclass(frozen=True, slots=True)
class Model:
    """The layout of a model's tokens in blocks: ``row_count`` rows (layers, K and V) of
    ``row_size`` bytes for each token. A fragment has ``block_tokens`` adjacent tokens.
    """

    name: str
    row_count: int
    row_size: int
    block_tokens: int = 16

    @property
    def fragment_size(self) -> int:
        """The bytes of a block's tokens in one row."""
        return self.row_size * self.block_tokens

    @property
    def block_size(self) -> int:
        """The bytes of a block."""
        return self.fragment_size * self.row_count


MODELS = (Model("Qwen-32B", 128, 1280), Model("Llama-3-8B", 64, 2048))
"""Source: the paper's Table 6."""


def selection(turn: int, context: int) -> NDArray[np.int64]:
    """Return 16 tokens of a context, ascending. Over 50 turns, 74 % of them have no neighbor.

    The others are in runs of two, and in one run of three if there are 11 single tokens.
    """
    few, of = _ALONE_IN_50
    runs = [1] * 11 + [2, 3] if turn % of < few else [1] * 12 + [2, 2]
    generator = np.random.default_rng(turn)
    lengths = generator.permutation(runs)
    gaps = generator.multinomial(context - SELECTED - len(runs), np.full(len(runs), 1 / len(runs)))
    starts = np.cumsum(gaps + 1 + np.concatenate([[0], lengths[:-1]]))
    return np.concatenate(
        [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    ).astype(np.int64)


def run_lengths(tokens: NDArray[np.int64]) -> dict[int, int]:
    """Return how many of a selection's tokens (ascending) are in runs of each length."""
    breaks = np.flatnonzero(np.diff(tokens) > 1) + 1
    lengths = np.diff(np.concatenate([[0], breaks, [len(tokens)]]))
    return {
        int(length): int(length * np.count_nonzero(lengths == length))
        for length in np.unique(lengths)
    }


def analysis(selections: list[NDArray[np.int64]]) -> str:
    """Describe the run lengths of selections in words."""
    counts: dict[int, int] = {}
    for tokens in selections:
        for length, count in run_lengths(tokens).items():
            counts[length] = counts.get(length, 0) + count
    total = sum(counts.values())
    shares = [
        f"{100 * counts[length] / total:.0f} % in runs of {length}" for length in sorted(counts)
    ]
    return f"of {total} tokens " + ", ".join(shares)
