# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The selections of tokens for the measurement of sparse reads."""

from __future__ import annotations

import numpy as np
from beluga_bench.harness.tokens import SELECTED, analysis, run_lengths, selection


def test_runs_are_counted_by_their_tokens() -> None:
    assert run_lengths(np.array([1, 2, 3, 7, 9, 10, 20])) == {1: 2, 2: 2, 3: 3}


def test_of_sixteen_tokens_74_percent_have_no_neighbor() -> None:
    selections = [selection(turn, 1000) for turn in range(50)]
    for tokens in selections:
        assert len(tokens) == SELECTED
        assert (np.diff(tokens) > 0).all()
        assert 0 <= tokens[0] <= tokens[-1] < 1000
    alone = sum(run_lengths(tokens)[1] for tokens in selections)
    assert alone / (50 * SELECTED) == 0.74
    assert analysis(selections).startswith("of 800 tokens 74 % in runs of 1, ")
