# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The origin of a page: the command, the version, the machine and the date."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from pathlib import Path


def origin() -> dict[str, str]:
    """Return the names and values for the page's header."""
    import beluga_bench  # slow to import

    system = platform.uname()
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "Command": command,
        "Version": f"beluga-kv {beluga_bench.version()}, Python {platform.python_version()}",
        "Machine": f"{beluga_bench.cpu_model()}, {system.system} {system.release}",
        "Date": datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
