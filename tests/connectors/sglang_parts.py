# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fakes of SGLang, for tests where it is not installed, and backends over a pool."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fakes import modules
from support.blocks import eventually

from beluga.connectors.sglang import weights

PACKAGE = "beluga.connectors.sglang"
PAGE, LAYERS, WIDTH, PAGES = 16, 4, 64, 12
LONG_S = 60.0


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


@dataclasses.dataclass
class Config:
    """SGLang's configuration of a rank."""

    tp_rank: int = 0
    tp_size: int = 2
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "model"
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0


class HostPool:
    """SGLang's host memory: K and V, with layers outside (layer_first) or inside of the pages."""

    def __init__(self, layout: str = "page_first", *, dtype: str = "bfloat16", mla: bool = False):
        self.layout, self.dtype, self.page_size, self.layer_num = layout, dtype, PAGE, LAYERS
        self.size = PAGES * PAGE  # in tokens
        halves = 1 if mla else 2
        shape = (halves, LAYERS, PAGES, PAGE * WIDTH)
        self.kv_buffer = np.zeros(shape, dtype=np.uint8)
        if layout != "layer_first":
            self.kv_buffer = np.zeros((halves, PAGES, LAYERS, PAGE * WIDTH), dtype=np.uint8)

    def page(self, number: int) -> list[Any]:
        """Return views of a page's buffers, in SGLang's order."""
        if self.layout != "layer_first":
            return [half[number] for half in self.kv_buffer]
        return [half[layer][number] for layer in range(LAYERS) for half in self.kv_buffer]

    def get_page_buffer_meta(self, indices: list[int]) -> tuple[list[int], list[int]]:
        assert len(indices) % PAGE == 0
        views = [view for i in indices[::PAGE] for view in self.page(i // PAGE)]
        return [view.ctypes.data for view in views], [view.nbytes for view in views]


class CopiedPool(HostPool):
    """Host memory without page addresses from SGLang: SGLang copies pages itself."""

    def get_page_buffer_meta(self, indices: list[int]) -> tuple[list[int], list[int]]:
        raise NotImplementedError("only copies")

    def get_data_page(self, index: int, flat: bool = True) -> Flat:
        return Flat(np.concatenate([part.ravel() for part in self.page(index // PAGE)]))

    def get_dummy_flat_data_page(self) -> Flat:
        return Flat(np.zeros_like(self.get_data_page(0).data))

    def set_from_flat_data_page(self, index: int, data_page: Flat) -> None:
        page = self.page(index // PAGE)
        for part, row in zip(page, data_page.data.reshape(len(page), -1), strict=True):
            part[:] = row.reshape(part.shape)


@dataclasses.dataclass
class Transfer:
    """SGLang's PoolTransfer."""

    name: str
    keys: list[str] | None = None
    host_indices: Any = None
    hit_policy: str = "all_pages"


class Flat:
    """A flat tensor in CPU memory."""

    device = types.SimpleNamespace(type="cpu")

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape  # type: ignore[no-any-return]

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.data.itemsize for step in self.data.strides)

    def data_ptr(self) -> int:
        return int(self.data.ctypes.data)

    def numel(self) -> int:
        return int(self.data.size)

    def element_size(self) -> int:
        return int(self.data.itemsize)

    def is_contiguous(self) -> bool:
        return bool(self.data.flags.c_contiguous)

    def contiguous(self) -> Flat:
        return Flat(np.ascontiguousarray(self.data))


def indices(pages: list[int]) -> list[int]:
    """Return SGLang's host indices of each token."""
    return [page * PAGE + token for page in pages for token in range(PAGE)]


def keys(count: int) -> list[str]:
    return [f"{i:064x}" for i in range(count)]


Make = Callable[..., Any]


def made_backends(monkeypatch: pytest.MonkeyPatch, pool_name: str) -> Iterator[Make]:
    """A function that makes backends, each with a host pool. They are closed afterwards."""
    for name, module in sglang().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(weights, "WEIGHTS", weights.Weights())
    made: list[Any] = []

    def make(
        host_pool: HostPool | None = None,
        *,
        v1: bool = True,
        attached: bool = True,
        rank: Config | None = None,
        **more: Any,
    ) -> Any:
        usual = {"backend_name": "beluga", "module_path": PACKAGE, "class_name": "BelugaHiCache"}
        settings = {"pool": pool_name, "timeout_ms": 5000, "retry_s": 0.05, "interface_v1": int(v1)}
        config = dataclasses.replace(rank or Config(), extra_config=usual | settings | more)
        made.append(importlib.import_module(PACKAGE).BelugaHiCache(config, {}))
        assert eventually(lambda: made[-1].attached == attached, LONG_S)
        made[-1].register_mem_pool_host(host_pool or HostPool())
        assert made[-1]._identity.wait(LONG_S)
        return made[-1]

    yield make
    for cache in made:
        cache.close()
    sys.modules.pop(f"{PACKAGE}.backend", None)
