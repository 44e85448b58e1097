# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fakes of LMCache, for tests where it is not installed, and what tests do with our plugins."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from support.blocks import eventually

from beluga import Pool
from beluga.connectors.lmcache import objects
from beluga.errors import PinLimitError
from beluga.index import IndexClient

SHAPE = (2, 4, 16, 64)  # K and V, layers, tokens, hidden
LONG_S = 60.0
PACKAGE = "beluga.connectors.lmcache"

MakeAdapter = Callable[..., Any]
Make = Callable[..., Any]


def damage(pool: Pool, block: NDArray[np.uint8]) -> None:
    """Change a byte of a block in the pool's files."""
    beginning = block[:1024].tobytes()
    for device in pool.devices:
        path = Path(str(device.path))
        where = path.read_bytes().find(beginning)
        if where >= 0:
            with path.open("r+b") as file:
                file.seek(where + 100)
                file.write(bytes([block[100] ^ 0x40]))
            return
    raise ValueError("the block is not in the pool")


def modules(package: str, contents: dict[str, dict[str, Any]]) -> dict[str, types.ModuleType]:
    """Make modules by name for sys.modules. Packages between them are empty."""
    made: dict[str, types.ModuleType] = {}
    for name, members in contents.items():
        components = name.split(".") if name else []
        for depth in range(len(components) + 1):
            path = ".".join([package, *components[:depth]])
            made.setdefault(path, types.ModuleType(path)).__path__ = []
        vars(made[".".join([package, *components])]).update(members)
    return made


class Bitmap:
    """LMCache's bitmap."""

    def __init__(self, count: int) -> None:
        self.bits = [False] * count

    def set(self, index: int) -> None:
        self.bits[index] = True


class StoreResult(int):
    """LMCache's L2StoreResult: bytes, or -1."""

    def __new__(cls, success: bool, size: int) -> StoreResult:
        return super().__new__(cls, size if success else -1)


class Notifier:
    """LMCache's EventNotifier."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


class L2AdapterInterface:
    """The part of LMCache's base class that adapters call."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []
        self.identity: tuple[str, bool] | None = None

    def set_backend_identity(self, name: str, shared: bool = False) -> None:
        self.identity = name, shared

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self.deleted += zip(keys, sizes, strict=True)


class KeyEntry(NamedTuple):
    """An object in a list of them."""

    key: Any
    size_bytes: int


class KeyListPage(NamedTuple):
    """A page of objects, and where the next one begins."""

    entries: tuple[KeyEntry, ...]
    next_page_token: str | None


class StoragePluginInterface:
    """LMCache's base class of storage plugins."""

    def __init__(self, dst_device: str, config: Any, metadata: Any, memory: Any, loop: Any) -> None:
        self.config, self.metadata = config, metadata
        self.local_cpu_backend, self.loop = memory, loop


def lmcache() -> dict[str, types.ModuleType]:
    """The package lmcache."""
    return modules(
        "lmcache",
        {
            "": {"__version__": "0.5.6"},
            "lmcache_native": {"Bitmap": Bitmap},
            "logging": {"init_logger": logging.getLogger},
            "v1.distributed.api": {"KeyEntry": KeyEntry, "KeyListPage": KeyListPage},
            "v1.distributed.internal_api": {"L2StoreResult": StoreResult},
            "v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
            "v1.platform": {"create_event_notifier": Notifier},
            "v1.memory_management": {
                "MemoryFormat": types.SimpleNamespace(KV_2LTD="KV_2LTD", KV_MLA_FMT="KV_MLA_FMT")
            },
            "v1.storage_backend.abstract_backend": {
                "StoragePluginInterface": StoragePluginInterface
            },
        },
    )


@dataclasses.dataclass(frozen=True)
class Dtype:
    """A dtype of torch, of two bytes."""

    name: str = "bfloat16"
    itemsize: int = 2

    def __str__(self) -> str:
        return f"torch.{self.name}"


class Memory:
    """LMCache's MemoryObj: bytes with a shape and a dtype."""

    def __init__(self, shape: tuple[int, ...], *, seed: int | None = None, device: str = "cpu"):
        self.shape, self.dtype, self.references = shape, Dtype(), 1
        size = int(np.prod(shape)) * self.dtype.itemsize
        self.data: NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)
        if seed is not None:
            self.data[:] = np.random.default_rng(seed).integers(0, 256, size)
        self.raw_tensor = types.SimpleNamespace(device=types.SimpleNamespace(type=device))

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.data)

    def get_shapes(self) -> list[tuple[int, ...]]:
        return [self.shape]

    def get_dtypes(self) -> list[Dtype]:
        return [self.dtype]

    def get_size(self) -> int:
        return len(self.data)

    def get_memory_format(self) -> str:
        return "KV_2LTD"

    def ref_count_up(self) -> None:
        self.references += 1

    def ref_count_down(self) -> None:
        self.references -= 1


@dataclasses.dataclass(frozen=True)
class ObjectKey:
    """LMCache's key of an object in MP mode."""

    chunk_hash: bytes
    model_name: str = "model"
    kv_rank: int = 1
    object_group_id: int = 0
    cache_salt: str = ""

    def to_encoded_object_key(self) -> ObjectKey:
        return self


@dataclasses.dataclass(frozen=True)
class ChunkKey:
    """LMCache's key of a chunk inside an engine, with the parameters of the request, which are not
    part of it.
    """

    text: str
    request_configs: Any = dataclasses.field(default=None, compare=False)

    def to_string(self) -> str:
        return self.text


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
    layout = types.SimpleNamespace(shapes=[shape], dtypes=[Dtype()])
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

    def get_dtypes(self) -> list[Dtype]:
        return [Dtype()]


class Allocator:
    """LMCache's LocalCPUBackend."""

    def __init__(self) -> None:
        self.made: list[Memory] = []

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any, *, busy_loop: bool) -> Memory:
        self.made.append(Memory(shapes[0]))
        return self.made[-1]


def filled(adapter: Any, count: int = 2) -> tuple[Any, list[ObjectKey], list[Memory]]:
    """Return an adapter that has stored objects, with their keys and contents."""
    keys, memories = chunks(count)
    assert store(adapter, keys, memories) == sum(memory.get_size() for memory in memories)
    return adapter, keys, memories


def put(plugin: Any, keys: list[ChunkKey], memories: list[Memory] | None = None) -> list[Memory]:
    """Put chunks into a plugin, and wait until the pool has them. Returns their contents."""
    calls: list[ChunkKey] = []
    memories = memories or [Memory(SHAPE, seed=i) for i in range(len(keys))]
    plugin.batched_submit_put_task(keys, memories, None, calls.append)
    assert eventually(lambda: calls == keys, LONG_S)
    return memories


def held_stores(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let stores wait until the event is set."""
    go, real = threading.Event(), objects.store
    monkeypatch.setattr(objects, "store", lambda *given: go.wait(LONG_S) and real(*given))
    return go


def no_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pool refuse every pin."""
    real = IndexClient.lookup

    def lookup(index: IndexClient, keys: Any, *, pin: bool = False) -> Any:
        if pin:
            raise PinLimitError("made up")
        return real(index, keys)

    monkeypatch.setattr(IndexClient, "lookup", lookup)
