# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fixtures: small pools, and a stand-in for a GPU."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cuda_gpu import STRIPE, Gpu

from beluga.pool import Pool


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    """Make a pool of two devices of 16 stripes each; some modules replace this fixture."""
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=16 * STRIPE, coherence="software", sparse=True) as it:
        yield it


@pytest.fixture(scope="module")
def long_pool(memory_root: Path) -> Iterator[Pool]:
    """Make a pool of three devices for all tests of a module."""
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir=memory_root))
    paths = [folder / "a", folder / "b", folder / "c"]
    try:
        with Pool.create(paths, device_size=8 * STRIPE, coherence="software", sparse=True) as made:
            yield made
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def gpu(compiled: None) -> Iterator[Gpu]:
    made = Gpu()
    yield made
    made.gate.set()
