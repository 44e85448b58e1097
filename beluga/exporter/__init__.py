# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The Prometheus exporter of a server (``beluga serve --metrics``).

It runs in the server's process, on threads of its own, and reads counters that the poll loop
counts anyway: the loop neither waits for it nor knows of it. ``names.py`` lists all metrics.
"""

from beluga.exporter.collect import Collector
from beluga.exporter.http import Exporter, read_address
from beluga.exporter.names import METRICS, TIER_PREFIXES

__all__ = ["METRICS", "TIER_PREFIXES", "Collector", "Exporter", "read_address"]
