# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Benchmarks: run by ``beluga bench``, described in README.md; installed as ``beluga_bench``.

::

    rows = beluga_bench.BENCHES["rpc"](beluga_bench.Options(smoke=True))
    beluga_bench.plot(rows, Path("charts"))

Each benchmark returns rows that all have the fields of :data:`FIELDS`.
"""

from __future__ import annotations

from .latency import bench_latency
from .options import Options
from .row import FIELDS, Bench, Row
from .rpc import bench_rpc

BENCHES: dict[str, Bench] = {
    "latency": bench_latency,
    "rpc": bench_rpc,
}

__all__ = ["BENCHES", "FIELDS", "Bench", "Options", "Row"]
