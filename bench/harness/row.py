# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rows of results: every benchmark has the same fields, with ``None`` where one does not
apply.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .machine import cpu_model, version
from .options import Options
from .ratio import Ratio

Row = dict[str, object]

EMULATED = ("tmpfs/DRAM", "hugetlbfs/DRAM")

FIELDS = (
    "bench",
    "case",
    "engine",  # the engine that copied: cpu, dsa, cuda
    "peer",  # another library that copied
    "crc",  # whether checksums were computed
    "fragment_bytes",  # the size of each fragment of an operation
    "fragments",
    "bytes",  # the size of each operation
    "depth",  # operations in flight
    "threads",
    "memory",  # devdax, tmpfs/DRAM (emulated), DRAM (private), paced, ...
    "coherence",
    "p50_ns",  # for one operation
    "p50_q1_ns",  # quartiles of p50_ns over rounds
    "p50_q3_ns",
    "p99_ns",
    "blocks",  # in the pool
    "ops_per_s",
    "keys_per_s",
    "gb_per_s",  # 1e9 bytes
    "limit",  # the speed of the limit loop, in limit_unit
    "limit_unit",
    "ratio_to_limit",  # 1.0 is as fast as the limit
    "ratio_q1",
    "ratio_q3",
    "ratio_to_peer",  # our speed / the peer's speed
    # the limit varied by more than a quarter over the pairs, or another process did not reach the
    # load that the case names, even when it was measured again
    "noisy",
    "paper",  # the paper's figure for a real CXL switch
    "note",
    "machine",
    "commit",
    "date",
    "command",
)


def is_smoke(row: Row) -> bool:
    """Return whether a row is from a smoke run, which shows only that the benchmark works."""
    return "--smoke" in str(row.get("command")).split()


def is_emulated(row: Row) -> bool:
    """Return whether a row's memory only emulates CXL memory."""
    memory = str(row.get("memory"))
    return memory == "paced" or memory.endswith(" file") or memory in EMULATED


@dataclass(frozen=True, slots=True)
class Recorder:
    """Makes a benchmark's rows. ``fixed`` has the fields that all its rows share."""

    bench: str
    options: Options
    fixed: Row

    def row(self, case: str, **values: object) -> Row:
        """Make a row. Raises KeyError for an unknown field."""
        given = {**self.fixed, **values}
        # JSON has no numbers of numpy.
        given = {k: v.item() if isinstance(v, np.generic) else v for k, v in given.items()}
        if unknown := given.keys() - set(FIELDS):
            raise KeyError(f"rows have no field {', '.join(sorted(unknown))}")
        run: Row = {
            "bench": self.bench,
            "case": case,
            "machine": cpu_model(),
            "commit": version(),
            "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
            "command": self.options.command(self.bench),
        }
        row = {**dict.fromkeys(FIELDS), **given, **run}
        if self.options.keep is not None:
            self.options.keep(row)
        return row

    def skipped(self, case: str, why: str, **values: object) -> Row:
        """Make a row without figures, with the reason."""
        return self.row(case, note=f"skipped: {why}", **values)


def percentiles(samples_ns: npt.NDArray[np.uint64]) -> Row:
    """Return the fields of single operations' times."""
    p50, p99 = np.percentile(samples_ns, [50, 99])
    return {"p50_ns": round(float(p50), 1), "p99_ns": round(float(p99), 1)}


def copies(ratio: Ratio, size: int) -> Row:
    """Return the fields of a race of operations per second, of ``size`` bytes each. The limit is in
    GB/s.
    """
    return {
        **speed(ratio.ours, size),
        "limit": round(ratio.limit * size / 1e9, 4),
        "limit_unit": "GB/s",
        **shares(ratio),
    }


def calls(ratio: Ratio) -> Row:
    """Return the fields of a race of calls per second."""
    return {
        "ops_per_s": round(ratio.ours),
        "limit": round(ratio.limit),
        "limit_unit": "ops/s",
        **shares(ratio),
    }


def speed(ops_per_s: float, size: int) -> Row:
    """Return the fields of a speed alone."""
    return {"ops_per_s": round(ops_per_s), "gb_per_s": round(ops_per_s * size / 1e9, 4)}


def shares(ratio: Ratio) -> Row:
    """Return the fields of a ratio."""
    return {
        "ratio_to_limit": _digits(ratio.ratio),
        "ratio_q1": _digits(ratio.ratio_q1),
        "ratio_q3": _digits(ratio.ratio_q3),
        "noisy": ratio.noisy,
    }


def _digits(value: float) -> float:
    """Round to four significant digits: a ratio of a starved run is small, and not 0."""
    return float(f"{value:.4g}")


Bench = Callable[[Options], list[Row]]
