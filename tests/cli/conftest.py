# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fixtures for commands: a small pool and a server of it."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from beluga import config
from beluga.cli import logs
from beluga.pool import Pool

SIZE = 24 << 20  # the size of each device; two fit in 64 MiB of /dev/shm

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def nothing_remains() -> Iterator[None]:
    """A command in this process leaves no log behind, and no pool of a beluga.toml."""
    yield
    logs.choose(None, None)
    config.prefer_pool([])


@pytest.fixture
def pool(shm: Path) -> list[str]:
    """The options that name a fresh pool of two devices."""
    paths = [str(shm / "device.0"), str(shm / "device.1")]
    Pool.create(paths, device_size=SIZE).close()
    return ["--pool", paths[0], "--pool", paths[1]]


@pytest.fixture
def server(pool: list[str], start: Start) -> subprocess.Popen[str]:
    """Start ``beluga serve`` on the pool."""
    child = start("serve", *pool)
    assert child.stderr
    assert child.stderr.readline().startswith("serving, epoch 1")
    return child
