# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fakes of LMCache's objects for our plugins, and helpers for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
from fakes import Memory, ObjectKey
from support.blocks import eventually

SHAPE = (2, 4, 16, 64)  # K and V, layers, tokens, hidden
LONG_S = 60.0
PACKAGE = "beluga.connectors.lmcache"

MakeAdapter = Callable[..., Any]


@contextlib.contextmanager
def l2(lmcache: Any, path: Path, **settings: Any) -> Iterator[Any]:
    """Make an L2 adapter of one pool."""
    usual = {"pool": str(path), "timeout_ms": 5000, "retry_s": 0.05, "identity": "a test"}
    adapter = lmcache.BelugaL2Adapter(usual | settings)
    try:
        assert eventually(lambda: adapter.report_status()["attached"], LONG_S)
        yield adapter
    finally:
        adapter.close()


def within(query: Callable[[], Any]) -> Any:
    """Poll until a query returns a result."""
    answers: list[Any] = []
    assert eventually(lambda: bool(answers.append(query()) or answers[-1] is not None), LONG_S)
    return answers[-1]


def store(adapter: Any, keys: list[Any], memories: list[Any]) -> int:
    task = adapter.submit_store_task(keys, memories)
    done: dict[int, Any] = {}
    assert eventually(
        lambda: task in (done.update(adapter.pop_completed_store_tasks()) or done), LONG_S
    )
    return int(done[task])


def lookup(adapter: Any, keys: list[Any], shape: tuple[int, ...] = SHAPE) -> list[bool]:
    layout = types.SimpleNamespace(shapes=[shape], dtypes=[fakes.Dtype()])
    task = adapter.submit_lookup_and_lock_task(keys, {0: layout, 1: layout})
    bits: list[bool] = within(lambda: adapter.query_lookup_and_lock_result(task)).bits
    return bits


def load(adapter: Any, keys: list[Any], memories: list[Any]) -> list[bool]:
    task = adapter.submit_load_task(keys, memories)
    bits: list[bool] = within(lambda: adapter.query_load_result(task)).bits
    return bits


def chunks(count: int, shape: tuple[int, ...] = SHAPE) -> tuple[list[ObjectKey], list[Memory]]:
    keys = [ObjectKey(bytes([i]) * 8) for i in range(count)]
    return keys, [Memory(shape, seed=i) for i in range(count)]


def blank(count: int, shape: tuple[int, ...] = SHAPE) -> list[Memory]:
    return [Memory(shape) for _ in range(count)]


@dataclasses.dataclass
class Metadata:
    """LMCache's metadata of an engine, with chunks of 16 tokens."""

    layers: int = 4
    model_name: str = "model"
    use_mla: bool = False
    chunk_size: int = 16

    def get_shapes(self, tokens: int = 16) -> list[tuple[int, ...]]:
        return [(2, self.layers, tokens, 64)]

    def get_dtypes(self) -> list[fakes.Dtype]:
        return [fakes.Dtype()]


class Allocator:
    """LMCache's LocalCPUBackend."""

    def __init__(self) -> None:
        self.made: list[Memory] = []

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any, *, busy_loop: bool) -> Memory:
        self.made.append(Memory(shapes[0]))
        return self.made[-1]
