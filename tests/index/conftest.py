# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A small pool with a block index, and clients of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

DEVICE_SIZE = 32 << 20
BLOCK_COUNT_MAX = 256


@pytest.fixture
def pool(paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(
        paths, device_size=DEVICE_SIZE, sparse=True, max_blocks=BLOCK_COUNT_MAX, lane_count=8
    ) as pool:
        yield pool


@pytest.fixture
def attach(pool: Pool, server: IndexServer) -> Iterator[Callable[[], IndexClient]]:
    """Creates clients with a session each."""
    with ExitStack() as clients:
        yield lambda: IndexClient(clients.enter_context(Client(pool)))


@pytest.fixture
def index(attach: Callable[[], IndexClient]) -> IndexClient:
    return attach()
