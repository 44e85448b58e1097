# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmarks, which ``beluga bench`` runs and docs/benchmarks.md describes.

They are installed as ``beluga_bench``.

::

    rows = beluga_bench.BENCHES["rpc"](beluga_bench.Options(smoke=True))
    beluga_bench.plot(rows, Path("charts"))

Each benchmark returns rows that all have the fields of :data:`FIELDS`.
"""

from __future__ import annotations

from .bandwidth import bench_bandwidth
from .blocks import bench_blocks
from .coherence import bench_coherence
from .copy import bench_copy
from .events import bench_events
from .gateway import bench_gateway
from .index import bench_index
from .indexer import bench_indexer
from .latency import bench_latency
from .machine import cpu_model, facts, version
from .options import Options
from .plot import plot
from .recorded import Recorded, load, peers
from .recovery import bench_recovery
from .report import Results, report
from .row import FIELDS, Bench, Row
from .rpc import bench_rpc
from .rpc_peers import bench_rpc_peers
from .run import Outcome, run
from .scheduler import bench_scheduler
from .tiers_disk import bench_tiers_disk
from .tiers_pool import bench_tiers_pool
from .tiers_remote import bench_tiers_remote

BENCHES: dict[str, Bench] = {
    "coherence": bench_coherence,
    "latency": bench_latency,
    "bandwidth": bench_bandwidth,
    "rpc": bench_rpc,
    "rpc-peers": bench_rpc_peers,
    "recovery": bench_recovery,
    "copy": bench_copy,
    "scheduler": bench_scheduler,
    "gateway": bench_gateway,
    "index": bench_index,
    "indexer": bench_indexer,
    "blocks": bench_blocks,
    "events": bench_events,
    "tiers-disk": bench_tiers_disk,
    "tiers-pool": bench_tiers_pool,
    "tiers-remote": bench_tiers_remote,
}

__all__ = [
    "BENCHES",
    "FIELDS",
    "Bench",
    "Options",
    "Outcome",
    "Recorded",
    "Results",
    "Row",
    "cpu_model",
    "facts",
    "load",
    "peers",
    "plot",
    "report",
    "run",
    "version",
]
