# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The other process of a benchmark: it is pinned to its own core and reads commands as lines of
JSON.

It sends ``{"ready": true}`` before it begins, and its result when it has ended.
"""

from __future__ import annotations

import json
import signal
import subprocess
from typing import IO, Any, cast

from beluga.child import start
from beluga.errors import BelugaError
from beluga.pool import Pool

_END_TIMEOUT_S = 10.0
_WORKER = f"{__package__}.worker"


class Peer:
    """This end of the connection: a context manager that ends the process."""

    def __init__(self, pool: Pool, cpu: int) -> None:
        paths = [f"{device.path}@{device.offset}+{device.size}" for device in pool.devices]
        self._process = start(
            _WORKER,
            str(cpu),
            *paths,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._commands = cast(IO[str], self._process.stdin)
        self._replies = cast(IO[str], self._process.stdout)

    def start(self, do: str, **arguments: object) -> None:
        """Start a command. Returns when the peer is ready. Raises BelugaError if the peer has
        ended.
        """
        self._commands.write(json.dumps({"do": do, **arguments}) + "\n")
        self._commands.flush()
        self.result()

    def result(self) -> dict[str, Any]:
        """Return the peer's next message. Raises BelugaError if the peer has ended."""
        line = self._replies.readline()
        if not line:
            raise BelugaError("the benchmark's other process has ended; see above")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def pause(self) -> None:
        """Stop the peer's threads, so that its core is free."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after :meth:`pause`."""
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # interrupted or failed: the peer may be in a long loop
            self._process.kill()
        self.resume()
        self._commands.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
