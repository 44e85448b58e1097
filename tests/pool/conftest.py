"""A directory in memory for the pools of these tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in memory that other users may enter."""
    path = Path(tempfile.mkdtemp(prefix="beluga-test-", dir="/dev/shm"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def two(shm: Path) -> list[Path]:
    """Paths for a two-device pool; the files do not exist."""
    return [shm / "pool.0", shm / "pool.1"]
