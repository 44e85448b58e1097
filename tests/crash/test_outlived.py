# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A get during which the server is replaced is a miss, and no block is reported as damaged."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support import roles
from support.blocks import CHAIN, content, keys
from support.role import Process

from beluga.index import IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool

NUMBERS = list(range(CHAIN))


@pytest.mark.parametrize("point", ["get.looked_up", "get.first_look", "get.copied"])
def test_a_get_that_outlives_its_server_misses_without_a_mismatch(
    paths: list[Path], coherence: str, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with (
        Pool.create(paths, device_size=16 << 20, coherence=coherence, sparse=True) as pool,
        Process(roles.serve_index, paths) as first,
        KVCache(pool, namespace="fetch", timeout_s=60) as cache,
    ):
        cache.put(keys(NUMBERS), [content(number) for number in NUMBERS]).raise_for_refused()
        with monkeypatch.context() as context:
            context.setenv("BELUGA_CRASH", f"{point}:stop")
            reader = Process(roles.fetch, paths)
        with reader:
            reader.send(json.dumps(NUMBERS))
            assert reader.stopped()
            first.kill()
            with IndexServer(pool):
                reader.signal(signal.SIGCONT)
                assert json.loads(reader.receive()) == [0, 0, 0]
                assert json.loads(reader.request(json.dumps(NUMBERS))) == [CHAIN, 0, 0]
                assert reader.end() == 0
