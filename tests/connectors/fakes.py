# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fakes of the parts of LMCache and SGLang that our plugins import, for tests where neither is
installed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import types
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga import Pool


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

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self.deleted += zip(keys, sizes, strict=True)


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


class HiCacheStorage:
    """SGLang's base class of storage backends."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}


@dataclasses.dataclass(frozen=True)
class PoolTransferResult:
    """SGLang's result of a lookup of pages."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class SglangSettings:
    """SGLang's settings, which it changes at run time."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "weight_version": "default",
            "model_path": "org/model",
            "revision": "c0ffee" + 34 * "0",  # a commit of the hub
        }

    def resolved_server_args_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def config_leaf(self, name: str) -> Any:
        if name not in self.values:
            raise ValueError(f"{name!r} is not a config leaf")
        return self.values[name]


def sglang() -> dict[str, types.ModuleType]:
    """The package sglang."""
    settings = SglangSettings()
    return modules(
        "sglang",
        {
            "version": {"__version__": "0.5.23"},
            "srt.mem_cache.hicache_storage": {
                "HiCacheStorage": HiCacheStorage,
                "PoolTransferResult": PoolTransferResult,
            },
            "srt.runtime_context": {"get_context": lambda: settings},
        },
    )


def sglang_scheduler(settings: SglangSettings) -> dict[str, types.ModuleType]:
    """The modules with which SGLang's scheduler changes its weights. ``updater`` is the scheduler's
    own.
    """

    class WeightUpdater:
        def end_weight_update(self, *, run_post_load: bool) -> None:
            pass

    class SchedulerWeightUpdaterManager:
        idle = True
        fault: Any = None  # what a write ends with: an exception, or False for no success

        def flush_cache_after_weight_update(
            self, recv_req: Any, success: bool, message: str
        ) -> tuple[bool, str]:
            return (success, message) if self.idle else (False, "requests are running")

        def update(self, version: str | None = None, *, flush_cache: bool = True) -> None:
            requested = types.SimpleNamespace(weight_version=version, flush_cache=flush_cache)
            if version is not None:
                settings.values["weight_version"] = version
            self.flush_cache_after_weight_update(requested, True, "updated")

        def update_weights_from_disk(self, recv_req: Any) -> Any:
            """Write weights as SGLang does: what fails is not flushed, and has no new version."""
            if isinstance(self.fault, Exception):
                raise self.fault
            if self.fault is False:
                return types.SimpleNamespace(success=False)
            self.update(recv_req.weight_version, flush_cache=recv_req.flush_cache)
            return types.SimpleNamespace(success=True)

        update_weights_from_distributed = update_weights_from_tensor = update_weights_from_disk
        update_weights_from_ipc = update_weights_from_disk

        def begin_weight_update(self, recv_req: Any) -> Any:
            return types.SimpleNamespace(success=True)

        def end_weight_update(self, recv_req: Any) -> Any:
            return types.SimpleNamespace(success=self.fault is None)

        def release_memory_occupation(self, recv_req: Any) -> None:
            pass

    return modules(
        "sglang",
        {
            "srt.managers.scheduler": {},
            "srt.managers.scheduler_components.weight_updater": {
                "SchedulerWeightUpdaterManager": SchedulerWeightUpdaterManager,
                "updater": SchedulerWeightUpdaterManager(),
            },
            "srt.model_executor.model_runner_components.weight_updater": {
                "WeightUpdater": WeightUpdater
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


@dataclasses.dataclass(frozen=True)
class ChunkKey:
    """LMCache's key of a chunk inside an engine, with the parameters of the request, which are not
    part of it.
    """

    text: str
    request_configs: Any = dataclasses.field(default=None, compare=False)

    def to_string(self) -> str:
        return self.text
