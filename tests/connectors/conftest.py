# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A small pool, by its paths: connectors open it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from beluga import MetaServer, Pool

DEVICE_SIZE = 48 << 20


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    """Two sparse devices in memory, without a server."""
    with Pool.create([shm / "a", shm / "b"], device_size=DEVICE_SIZE, sparse=True) as pool:
        yield pool


@pytest.fixture
def pool_name(pool: Pool) -> str:
    """The pool as settings name it."""
    return ":".join(str(device.path) for device in pool.devices)


@pytest.fixture
def server(pool: Pool) -> Iterator[MetaServer]:
    with MetaServer(pool) as server:
        yield server
