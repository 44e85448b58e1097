# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Keys that were requested long ago: the service does not load them any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.emulation import PATIENCE

HERE = Path(__file__).parent


def test_requested_keys_expire_after_a_minute(shm: Path, tmp_path: Path) -> None:
    clock = tmp_path / "clock.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(clock), str(HERE / "wound_clock.c")]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "aged_chains.py"), str(shm / "pool")],
        env=os.environ | {"LD_PRELOAD": str(clock)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60 * PATIENCE,
    )
    assert done.stdout.splitlines() == ["[0, 1, 2]", "[10, 11, 12]", "[]", "6"]
