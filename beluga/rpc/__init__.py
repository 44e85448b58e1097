# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls over lanes of slots in the pool (``csrc/rpc/lane.c``, ``csrc/rpc/server.c``).

:class:`Server` serves registered handlers, :class:`Client` calls them. The block index
(:mod:`beluga.index`) is one user. Example::

    def shout(text: str) -> str:
        return text.upper()

    with Pool.open(["a", "b"]) as pool, Server(pool) as server:
        server.register(Handlers(shout))
        with Client(pool) as client:
            client.call("shout", "hello", returns=str)  # 'HELLO'
"""

from beluga.arguments import nanoseconds
from beluga.choices import SILENT_S
from beluga.rpc.client import Buffer, Client, ClientStat
from beluga.rpc.handlers import HandlerInfo, Handlers, load_handlers
from beluga.rpc.report import KINDS, SECONDS, Operation, Report, ReportTotals
from beluga.rpc.server import (
    DEMOTIONS,
    LOST,
    METHOD_COUNTERS,
    METHOD_USER,
    REASONS,
    TAKEN,
    Calls,
    Quota,
    Server,
    ServerStat,
    TakeoverCause,
    method_names,
    stand_by,
)
from beluga.rpc.trace import CallTrace, TracedCall, read_trace

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
    "Buffer",
    "CallTrace",
    "Calls",
    "Client",
    "ClientStat",
    "HandlerInfo",
    "Handlers",
    "Operation",
    "Quota",
    "Report",
    "ReportTotals",
    "Server",
    "ServerStat",
    "TakeoverCause",
    "TracedCall",
    "load_handlers",
    "method_names",
    "nanoseconds",
    "read_trace",
    "stand_by",
]
