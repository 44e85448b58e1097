# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The routes of a server of blocks: those of ``beluga serve``."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

from beluga.admin.handler import METRICS
from beluga.admin.operate import operate_routes
from beluga.admin.page import page_routes
from beluga.admin.route import AdminRequest, AdminResponse, Route, Routes, json_response
from beluga.exporter import Collector, ServerCollector
from beluga.live import Observer
from beluga.metrics import prometheus_text

if TYPE_CHECKING:
    from beluga.index import IndexServer
    from beluga.pool import Pool
    from beluga.rpc import Server
    from beluga.tiers import TierService

_METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"


def lane_routes(server: Server, pool: Pool) -> Routes:
    """Return the routes of a server without the block index: its metrics."""
    return {("GET", METRICS): _metrics(ServerCollector(server, pool))}


def _metrics(collector: ServerCollector) -> Route:
    lock = threading.Lock()

    def metrics(_: AdminRequest) -> AdminResponse:
        with lock:
            return AdminResponse(prometheus_text(collector.collect()).encode(), _METRICS_KIND)

    return metrics


def server_routes(server: IndexServer, pool: Pool, tiers: TierService | None = None) -> Routes:
    """Return all routes of a server; ``tiers`` is the service of its lower tiers."""
    observer = Observer(server, pool)

    def live(request: AdminRequest) -> AdminResponse:
        found = observer.snapshot()
        if "history" not in request.query:
            found = dataclasses.replace(found, history=())
        return json_response(dataclasses.asdict(found))

    return {
        ("GET", METRICS): _metrics(Collector(server, pool)),
        ("GET", "/live"): live,
        **page_routes(),
        **operate_routes(server, pool, tiers),
    }
