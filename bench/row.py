# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A row of results: the same fields in every benchmark, ``None`` where one does not apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .machine import cpu_model, version
from .options import Options
from .ratio import Ratio

Row = dict[str, object]

FIELDS = (
    "bench",
    "case",
    "engine",  # what copied: cpu, dsa, cuda
    "peer",  # what else did
    "crc",  # with checksums?
    "fragment_bytes",  # of each of an operation's fragments
    "fragments",
    "bytes",  # of each operation
    "depth",  # operations out at a time
    "threads",
    "memory",  # devdax, tmpfs/DRAM (emulated), DRAM (private), paced, ...
    "coherence",
    "p50_ns",  # of one operation
    "p99_ns",
    "ops_per_s",
    "gb_per_s",  # 1e9 bytes
    "limit",  # of the limit loop, in limit_unit
    "limit_unit",
    "ratio_to_limit",  # 1.0: as fast as the limit
    "ratio_q1",
    "ratio_q3",
    "ratio_to_peer",  # ours / the peer's speed
    "noisy",  # the limit varied by more than a quarter over the pairs, even when tried again
    "paper",  # the paper's figure, on a real CXL switch
    "note",
    "machine",
    "commit",
    "command",
)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Makes a benchmark's rows; ``fixed`` holds what its rows have in common."""

    bench: str
    options: Options
    fixed: Row

    def row(self, case: str, **values: object) -> Row:
        """A row; raises KeyError for a field that there is not."""
        given = {**self.fixed, **values}
        if unknown := given.keys() - set(FIELDS):
            raise KeyError(f"rows have no field {', '.join(sorted(unknown))}")
        run: Row = {
            "bench": self.bench,
            "case": case,
            "machine": cpu_model(),
            "commit": version(),
            "command": self.options.command(self.bench),
        }
        return {**dict.fromkeys(FIELDS), **given, **run}

    def skipped(self, case: str, why: str, **values: object) -> Row:
        """A row that says why there is no number."""
        return self.row(case, note=f"skipped: {why}", **values)


def percentiles(samples_ns: npt.NDArray[np.uint64]) -> Row:
    """The fields made of single operations' times."""
    p50, p99 = np.percentile(samples_ns, [50, 99])
    return {"p50_ns": round(float(p50), 1), "p99_ns": round(float(p99), 1)}


def copies(found: Ratio, size: int) -> Row:
    """The fields of a race of operations per second, of ``size`` bytes each, limit in GB/s."""
    return {
        **speed(found.ours, size),
        "limit": round(found.limit * size / 1e9, 4),
        "limit_unit": "GB/s",
        **shares(found),
    }


def calls(found: Ratio) -> Row:
    """The fields of a race of calls per second."""
    return {
        "ops_per_s": round(found.ours),
        "limit": round(found.limit),
        "limit_unit": "ops/s",
        **shares(found),
    }


def speed(ops_per_s: float, size: int) -> Row:
    """The fields of a speed alone."""
    return {"ops_per_s": round(ops_per_s), "gb_per_s": round(ops_per_s * size / 1e9, 4)}


def shares(found: Ratio) -> Row:
    """The fields of a ratio."""
    return {
        "ratio_to_limit": round(found.ratio, 3),
        "ratio_q1": round(found.ratio_q1, 3),
        "ratio_q3": round(found.ratio_q3, 3),
        "noisy": found.noisy,
    }


Bench = Callable[[Options], list[Row]]
