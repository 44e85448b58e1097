# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmarks, which ``beluga bench`` runs and docs/understand/benchmarks.md describes.

They are installed as ``beluga_bench``.

::

    rows = beluga_bench.BENCHES["rpc"](beluga_bench.Options(smoke=True))
    beluga_bench.plot(rows, Path("charts"))

Each benchmark returns rows that all have the fields of :data:`FIELDS`.
"""

from __future__ import annotations

from .harness.machine import cpu_model, facts, version
from .harness.options import Options
from .harness.recorded import Recorded, load, recorded_peers
from .harness.report import Results, report
from .harness.row import FIELDS, Bench, Row
from .harness.run import Outcome, run
from .paper.bandwidth import bench_bandwidth
from .paper.coherence import bench_coherence
from .paper.copy import bench_copy
from .paper.copy_save import save_crossings
from .paper.latency import bench_latency
from .paper.rpc import bench_rpc
from .peers.rpc_peers import bench_rpc_peers
from .system.blocks import bench_blocks
from .system.events import bench_events
from .system.gateway import bench_gateway
from .system.index import bench_index
from .system.indexer import bench_indexer
from .system.recovery import bench_recovery
from .system.scheduler import bench_scheduler
from .system.tiers_disk import bench_tiers_disk
from .system.tiers_pool import bench_tiers_pool
from .system.tiers_remote import bench_tiers_remote

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

_POOL = ("pool", "coherence")
USES: dict[str, tuple[str, ...]] = {
    "coherence": _POOL,
    "latency": (*_POOL, "pace"),
    "bandwidth": (*_POOL, "pace", "threads"),
    "rpc": _POOL,
    "rpc-peers": _POOL,
    "recovery": ("coherence",),
    "copy": (*_POOL, "threads"),
    "scheduler": _POOL,
    "gateway": (),
    "index": ("coherence",),
    "indexer": (),
    "blocks": (),
    "events": _POOL,
    "tiers-disk": ("disk",),
    "tiers-pool": (*_POOL, "disk"),
    "tiers-remote": (),
}
"""The options of :class:`Options`, other than ``smoke``, that a benchmark uses."""

__all__ = [
    "BENCHES",
    "FIELDS",
    "USES",
    "Bench",
    "Options",
    "Outcome",
    "Recorded",
    "Results",
    "Row",
    "cpu_model",
    "facts",
    "load",
    "recorded_peers",
    "report",
    "run",
    "save_crossings",
    "version",
]
