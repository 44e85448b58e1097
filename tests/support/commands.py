# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Programs that a test runs to their end."""

import subprocess
from collections.abc import Sequence
from typing import Any


def captured(command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, and return its status and its streams as text, whatever the status is."""
    words = list(map(str, command))
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)
