# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts and gets over a link move the same bytes, and the link counts all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from beluga import IndexServer, KVCache, Pool
from beluga.transfer import (
    CpuEngine,
    IoHandle,
    Link,
    LinkSettings,
    ScheduledEngine,
    Speed,
    TransferClass,
)
from tests.kvcache.conftest import digests, payload

LENGTH = 5 << 18


@pytest.fixture
def handle(pool: Pool, shm: Path) -> Iterator[IoHandle]:
    speed = Speed(1 << 30)
    settings = LinkSettings(read=speed, write=speed, device=speed)
    made = IoHandle(Link("cache", settings, pool=pool, directory=shm))
    yield made
    made.close()


@pytest.mark.parametrize("check_checksums", [True, False])
def test_a_cache_with_a_link_stores_and_loads_blocks(
    pool: Pool, server: IndexServer, handle: IoHandle, *, check_checksums: bool
) -> None:
    engine = ScheduledEngine(CpuEngine(pool, 1), handle, read=TransferClass.PREFETCH)
    blocks = payload(4, LENGTH)
    targets = np.zeros_like(blocks)
    with KVCache(pool, namespace="test", engine=engine, check_checksums=check_checksums) as cache:
        assert cache.put(digests(4), blocks).stored == 4
        found = cache.get(digests(4), targets)
    assert (found.hits, found.mismatches) == (4, 0)
    assert np.array_equal(blocks, targets)
    assert handle.link.bytes_of(TransferClass.OFFLOAD) == (0, 4 * LENGTH)
    assert handle.link.bytes_of(TransferClass.PREFETCH) == (4 * LENGTH, 0)
    assert handle.transfer_stats(TransferClass.PREFETCH).pieces >= 4 * LENGTH // (256 << 10)
    engine.close()
