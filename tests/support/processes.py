# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real processes for tests, controlled by lines, so that they can be killed or stopped. Their
programs are in roles.py. A process that still runs at the end of the test is killed.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from pathlib import Path

from support import forked
from support.emulation import PATIENCE

ROLES = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from support import roles
roles.main()
"""


class Process:
    """A Python process that plays a role of roles.py over the pool on ``paths``."""

    def __init__(self, role: str, paths: list[Path]) -> None:
        self._process = forked.start(ROLES, role, *paths)
        greeting = self.receive()
        if greeting != "ready":
            self.kill()
            raise RuntimeError(f"{role}: {greeting}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")

    def receive(self, timeout_s: float | None = None) -> str:
        """Return the next line that it prints; "" if it has ended, or after the timeout."""
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return ""
        return self._process.stdout.readline().rstrip("\n")

    def request(self, line: str) -> str:
        self.send(line)
        return self.receive()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def died(self) -> int:
        """Wait until it has killed itself at a crash point. Returns the negative signal number."""
        status = self._process.wait(timeout=60 * PATIENCE)
        self._close()
        return status

    def stopped(self) -> bool:
        """Wait until it has stopped itself at a crash point. Returns False if it died instead."""
        while self._process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                if Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] == "T":
                    return True
            time.sleep(0.005)
        return False

    def kill(self) -> None:
        """Kill it, and wait until it has ended."""
        self._process.kill()
        self._close()

    def end(self) -> int:
        """Close its input, and wait for its end. Returns its exit status."""
        assert self._process.stdin
        self._process.stdin.close()
        status = self._process.wait(timeout=60 * PATIENCE)
        self._close()
        return status

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()
        self._process.wait(timeout=60 * PATIENCE)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._close()
