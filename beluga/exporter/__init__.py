# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server's metrics for Prometheus (``GET /metrics`` of its admin endpoint).

The collector reads counters that the poll loop maintains anyway, so the loop never waits for it.
``names.py`` lists all metrics.
"""

from beluga.exporter.collect import Collector, ServerCollector
from beluga.exporter.names import HANDLER_PREFIX, METRICS, REGISTRY_PREFIXES

__all__ = ["HANDLER_PREFIX", "METRICS", "REGISTRY_PREFIXES", "Collector", "ServerCollector"]
