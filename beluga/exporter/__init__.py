# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What Prometheus is told of a server (``GET /metrics`` of its admin endpoint).

The collector reads counters that the poll loop counts anyway: the loop neither waits for it nor
knows of it. ``names.py`` lists all metrics.
"""

from beluga.exporter.collect import Collector
from beluga.exporter.names import METRICS, TIER_PREFIXES

__all__ = ["METRICS", "TIER_PREFIXES", "Collector"]
