# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The calls that SGLang's HiCacheController makes, in its order, replayed over a fake of SGLang.

``sglang_calls.json.xz`` is recorded from the real controller (``sglang_controller_role.py``), and
``test_real_packages.py`` checks that the controller still makes these calls. Keys are numbers, and
host indices are pages.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_parts import Flat, HostPool, Make, indices, keys, made_backends

from beluga import IndexServer

RECORDED = json.loads(
    lzma.decompress(Path(__file__).with_name("sglang_calls.json.xz").read_bytes())
)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, pool_name: str) -> Iterator[Make]:
    yield from made_backends(monkeypatch, pool_name)


def content(key: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(key).integers(0, 256, 4096, dtype=np.uint8)


class Player:
    """Makes recorded calls with pages of known content, and checks the bytes that come back."""

    def __init__(self, backend: Any, host_pool: HostPool) -> None:
        self.backend, self.host_pool = backend, host_pool

    def batch_exists(self, some: list[int]) -> int:
        return int(self.backend.batch_exists([keys(some[-1] + 1)[i] for i in some], None))

    def batch_set_v1(self, some: list[int], pages: list[int]) -> list[bool]:
        for key, page in zip(some, pages, strict=True):
            for part in self.host_pool.page(page):
                part[:] = np.resize(content(key), part.shape)
        names = [keys(some[-1] + 1)[i] for i in some]
        return list(self.backend.batch_set_v1(names, indices(pages), None))

    def batch_get_v1(self, some: list[int], pages: list[int]) -> list[bool]:
        self.host_pool.kv_buffer[:] = 0
        names = [keys(some[-1] + 1)[i] for i in some]
        found = list(self.backend.batch_get_v1(names, indices(pages), None))
        for key, page, there in zip(some, pages, found, strict=True):
            for part in self.host_pool.page(page):
                assert np.array_equal(part, np.resize(content(key), part.shape)) == there
        return found

    def batch_set(self, some: list[int]) -> bool:
        names = [keys(some[-1] + 1)[i] for i in some]
        return bool(self.backend.batch_set(names, [Flat(content(key)) for key in some]))

    def batch_get(self, some: list[int]) -> list[bool]:
        targets = [Flat(np.zeros(4096, dtype=np.uint8)) for _ in some]
        names = [keys(some[-1] + 1)[i] for i in some]
        found = self.backend.batch_get(names, targets)
        for key, target, one in zip(some, targets, found, strict=True):
            assert np.array_equal(target.data, content(key)) == (one is not None)
        return [one is not None for one in found]

    def clear(self) -> None:
        self.backend.clear()


@pytest.mark.parametrize("way", RECORDED)
def test_the_recorded_calls_have_the_recorded_results(
    server: IndexServer, backend: Make, way: str
) -> None:
    host_pool = HostPool()
    player = Player(backend(host_pool, v1=way == "in place"), host_pool)
    for name, *arguments, result in RECORDED[way]:
        assert (name, getattr(player, name)(*arguments)) == (name, result)


@pytest.mark.parametrize("way", RECORDED)
def test_the_recorded_calls_miss_without_a_pool_and_end(backend: Make, way: str) -> None:
    host_pool = HostPool()
    player = Player(backend(host_pool, v1=way == "in place", attached=False), host_pool)
    for name, *arguments, result in RECORDED[way]:
        if name != "clear":
            found = getattr(player, name)(*arguments)
            assert not any(found if isinstance(result, list) else [found])
