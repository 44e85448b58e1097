# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The slowest of the last calls, from the server's trace in the runtime directory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from beluga.errors import RpcError
from beluga.live.snapshot import SlowCall
from beluga.rpc import read_trace

if TYPE_CHECKING:
    from pathlib import Path

_COUNT = 10
_COST_SHARE = 0.001  # fraction of a core: reading the trace takes some milliseconds


class RecentCalls:
    """Reads the trace of a runtime directory. The interval bounds the CPU time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: tuple[SlowCall, ...] = ()
        self._due_s = 0.0

    def slowest(self) -> tuple[SlowCall, ...]:
        """Return the slowest calls of the trace, the slowest first."""
        if time.monotonic() >= self._due_s:
            started_s = time.thread_time()
            self._found = self._read()
            spent_s = time.thread_time() - started_s
            self._due_s = time.monotonic() + spent_s / _COST_SHARE
        return self._found

    def _read(self) -> tuple[SlowCall, ...]:
        try:
            calls = read_trace(self._directory).slowest(_COUNT)
        except (RpcError, OSError):  # the server could not create a trace, or it stands by
            return ()
        return tuple(
            SlowCall(
                time_s=call.time_s,
                method=call.method,
                host=call.host,
                pid=call.pid,
                keys=call.keys,
                seconds=call.seconds,
                status=call.status,
            )
            for call in calls
        )
