# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interpreter of the peers' environment, and the test whether it can import a peer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from beluga.errors import BelugaError

_VARIABLE = "BELUGA_PEERS_PYTHON"


class PeerUnavailableError(BelugaError):
    """A peer is not available here. The text has the reason."""


def peers_python(module: str) -> str:
    """Return the interpreter if it can import ``module``. Raises PeerUnavailableError."""
    python = os.environ.get(_VARIABLE)
    if not python or not Path(python).exists():
        raise PeerUnavailableError("no environment with other people's packages; see setup-peers")
    command = [python, "-Ic", f"import {module}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()
        raise PeerUnavailableError(lines[-1] if lines else f"importing {module} failed")
    return python
