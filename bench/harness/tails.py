# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The 99th percentile of an operation's time during other work, compared with that of the same
operation alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .ratio import compare
from .row import Recorder, Row, percentiles, shares

Times = NDArray[np.uint64]
"""Nanoseconds of single operations."""


def tails_row(
    recorder: Recorder,
    case: str,
    pairs: Sequence[tuple[Times, Times]],
    *,
    work: str,
    **fields: object,
) -> Row:
    """Make a row of pairs of times, alone and during some ``work``. Its ratio is that of the 99th
    percentiles: 0.5 means that the slow operations take twice as long during the work.
    """
    results = compare([(1e9 / _p99(alone), 1e9 / _p99(loaded)) for alone, loaded in pairs])
    alone, loaded = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    note = (
        f"p99 of all: {_p99(loaded) / 1e6:.2f} ms beside {work}, {_p99(alone) / 1e6:.2f} ms "
        f"alone: {_p99(loaded) / _p99(alone):.2f} times"
    )
    return recorder.row(
        case,
        note=note,
        ops_per_s=round(len(loaded) * 1e9 / int(loaded.sum())),
        **fields,
        **percentiles(loaded),
        **shares(results),
    )


def _p99(times: Times) -> float:
    return float(np.percentile(times, 99))
