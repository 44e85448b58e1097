# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Names of devices for the pools of these tests."""

from pathlib import Path

import pytest


@pytest.fixture
def two(shm: Path) -> list[Path]:
    """Paths for a two-device pool; the files do not exist."""
    return [shm / "pool.0", shm / "pool.1"]
