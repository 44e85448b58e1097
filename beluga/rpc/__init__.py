# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls over lanes of slots in the pool (``csrc/rpc/lane.c``, ``csrc/rpc/server.c``).

:class:`Server` serves registered handlers, :class:`Client` calls them. The block index
(:mod:`beluga.meta`) is one user of it; yours may be another::

    with Pool.open(["a", "b"]) as pool, Server(pool) as server:
        server.handle(64, lambda request: request.upper())
        with Client(pool) as client:
            client.call(64, b"hello")      # b'HELLO'
"""

from beluga.rpc.client import Client, ClientStat
from beluga.rpc.report import KINDS, SECONDS, Figure, Operation, Report, Reported
from beluga.rpc.server import (
    METHOD_COUNTERS,
    METHOD_USER,
    Calls,
    Quota,
    Server,
    ServerStat,
    method_names,
)
from beluga.rpc.standby import SILENT_S, Keeper, stand_by
from beluga.rpc.takeovers import DEMOTIONS, LOST, REASONS, TAKEN, Followed
from beluga.rpc.times import nanoseconds
from beluga.rpc.trace import Trace, TracedCall, read_trace

__all__ = [
    "DEMOTIONS",
    "KINDS",
    "LOST",
    "METHOD_COUNTERS",
    "METHOD_USER",
    "REASONS",
    "SECONDS",
    "SILENT_S",
    "TAKEN",
    "Calls",
    "Client",
    "ClientStat",
    "Figure",
    "Followed",
    "Keeper",
    "Operation",
    "Quota",
    "Report",
    "Reported",
    "Server",
    "ServerStat",
    "Trace",
    "TracedCall",
    "method_names",
    "nanoseconds",
    "read_trace",
    "stand_by",
]
