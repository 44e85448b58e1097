# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The simulator: the results of routing policies on a trace, on a cluster that is computed, not
run.

The policies, the router's account of loads and the code that evicts are the real ones. Prefill,
decode and copies take the time that beluga/router/costs.py gives.
"""

from beluga.simulate.formats import FORMATS, load_trace, trace_requests
from beluga.simulate.memory import ORDERS
from beluga.simulate.options import (
    ENGINES,
    MEMORIES,
    PRESETS,
    SPEED_MAX,
    SPEED_MIN,
    Options,
    Scale,
    unequal_memory,
)
from beluga.simulate.report import make_report
from beluga.simulate.result import Row, Spread, found_shares, goodput
from beluga.simulate.run import simulate
from beluga.simulate.trace import TIME_UNITS, Reading, Trace, TraceEntry, make_trace

__all__ = [
    "ENGINES",
    "FORMATS",
    "MEMORIES",
    "ORDERS",
    "PRESETS",
    "SPEED_MAX",
    "SPEED_MIN",
    "TIME_UNITS",
    "Options",
    "Reading",
    "Row",
    "Scale",
    "Spread",
    "Trace",
    "TraceEntry",
    "found_shares",
    "goodput",
    "load_trace",
    "make_report",
    "make_trace",
    "simulate",
    "trace_requests",
    "unequal_memory",
]
