# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's own storage interface on a pool, without a GPU.

Run it in .venv-adapters: sglang_role.py POOL. It prints the results as one line of JSON. SGLang's
package and its host pools cannot be imported as a whole here. So the package has only its path, and
the pools' methods that lay pages out are read from the source.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

POOL = sys.argv[1]
PAGE, PAGE_COUNT, LAYERS, COUNT = 16, 8, 3, 4
METHODS = (
    "get_data_page",
    "get_dummy_flat_data_page",
    "set_from_flat_data_page",
    "get_page_buffer_meta",
)

_SPEC = importlib.util.find_spec("sglang")
assert _SPEC is not None
assert _SPEC.submodule_search_locations is not None
SGLANG = Path(_SPEC.submodule_search_locations[0])
_package = types.ModuleType("sglang")
_package.__path__ = [str(SGLANG)]
_package.__spec__ = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
sys.modules["sglang"] = _package

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

from beluga.connectors.sglang import BelugaHiCache  # noqa: E402


def methods_of(file: str, name: str) -> dict[str, Any]:
    """Return SGLang's own functions of a host pool."""
    tree = ast.parse((SGLANG / "srt/mem_cache/pool_host" / file).read_text())
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    wanted = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name in METHODS]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(wanted, []), file, "exec"), scope)  # noqa: S102  SGLang's own source
    return {name: scope[name] for name in METHODS}


class HostPool:
    """The parts of a pool in memory that SGLang's methods need, with pages of random bytes or of
    zeros.
    """

    def __init__(self, layout: str, *, mla: bool, seed: int | None) -> None:
        self.layout, self.dtype, self.device, self.pin_memory = layout, torch.bfloat16, "cpu", False
        self.page_size = self.logical_page_size = PAGE
        self.dcp_size, self.layer_num, self.page_num = 1, LAYERS, PAGE_COUNT
        self.size = PAGE * PAGE_COUNT
        self.head_num, self.head_dim, self.kv_cache_dim = (1, 0, 40) if mla else (2, 20, 0)
        file, name = ("mla.py", "MLA") if mla else ("mha.py", "MHA")
        for method, function in methods_of(file, f"{name}TokenToKVPoolHost").items():
            setattr(self, method, types.MethodType(function, self))
        halves = () if mla else (2,)
        width = (1, self.kv_cache_dim) if mla else (self.head_num, self.head_dim)
        shape = {
            "layer_first": (*halves, LAYERS, self.size, *width),
            "page_first": (*halves, self.size, LAYERS, *width),
            "page_first_direct": (*halves, PAGE_COUNT, LAYERS, PAGE, *width),
            "page_head": (*halves, PAGE_COUNT, width[0], PAGE, LAYERS, width[1]),
        }[layout]
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self.kv_buffer.copy_(torch.randn(shape, generator=generator))

    def _storage_page_index(self, index: int) -> int:
        return index


def config(*, mla: bool, direct: bool) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="org/model",
        extra_config={
            "backend_name": "beluga",
            "module_path": "beluga.connectors.sglang",
            "class_name": "BelugaHiCache",
            "interface_v1": int(direct),
            "pool": POOL,
            "timeout_ms": 5000,
            "identity": "a model of a test",
        },
    )


def backend(host_pool: HostPool, *, mla: bool, direct: bool) -> Any:
    """Attach a storage backend as SGLang's cache controller does."""
    settings = config(mla=mla, direct=direct)
    made = StorageBackendFactory.create_backend("dynamic", settings, host_pool)
    made.register_mem_pool_host(host_pool)
    made.on_host_pools_registered()
    return made


def indices(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, page * PAGE + PAGE) for page in pages])


def move_in_place(writer: Any, reader: Any) -> bool:
    """Move pages as the controller does with interface_v1."""
    keys = [f"{i:064x}" for i in range(COUNT)]
    return (
        reader.batch_exists(keys) == 0
        and writer.batch_set_v1(keys, indices([0, 2, 4, 6])) == [True] * COUNT
        and reader.batch_exists(keys) == COUNT
        and reader.batch_get_v1(keys, indices([7, 5, 3, 1])) == [True] * COUNT
    )


def move_flat(writer: Any, reader: Any) -> bool:
    """Move pages as the controller does without interface_v1."""
    keys = [f"{i:064x}" for i in range(COUNT)]
    sources = [writer.mem_pool_host.get_data_page(page * PAGE) for page in (0, 2, 4, 6)]
    targets = [reader.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
    stored = reader.batch_exists(keys) == 0 and writer.batch_set(keys, sources)
    results = reader.batch_get(keys, targets)
    for page, tensor in zip((7, 5, 3, 1), results, strict=True):
        if tensor is not None:
            reader.mem_pool_host.set_from_flat_data_page(page * PAGE, tensor)
    return stored and None not in results and reader.batch_exists(keys) == COUNT


def round_trip(layout: str, *, mla: bool, direct: bool) -> bool:
    """Return whether pages come back at other places exactly, and nothing else is written."""
    source = HostPool(layout, mla=mla, seed=1)
    target = HostPool(layout, mla=mla, seed=None)
    writer, reader = (backend(pool, mla=mla, direct=direct) for pool in (source, target))
    moved = (move_in_place if direct else move_flat)(writer, reader)
    for backend_ in (writer, reader):
        backend_.close()
    same = all(
        torch.equal(source.get_data_page(put * PAGE), target.get_data_page(got * PAGE))
        for put, got in zip([0, 2, 4, 6], [7, 5, 3, 1], strict=True)
    )
    untouched = not any(target.get_data_page(page * PAGE).any() for page in (0, 2, 4, 6))
    return moved and same and untouched


def differences() -> list[str]:
    """Return the methods of ours that cannot be called as SGLang's are."""
    differing = sorted(getattr(BelugaHiCache, "__abstractmethods__", ()))
    for name, ours in vars(BelugaHiCache).items():
        theirs = getattr(HiCacheStorage, name, None)
        if name.startswith("_") or theirs is None:
            continue
        parameters = [list(inspect.signature(f).parameters.values()) for f in (theirs, ours)]
        names = [[(p.name, p.default is p.empty) for p in each] for each in parameters]
        if names[0] != names[1]:
            differing.append(f"{name}: {names[0]} is {names[1]} here")
    return differing


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    mha = ("layer_first", "page_first", "page_first_direct", "page_head")
    mla_layouts = ("layer_first", "page_first", "page_first_direct")
    trips = {
        f"{'mla' if mla else 'mha'} {layout} {'in place' if direct else 'flat'}": round_trip(
            layout, mla=mla, direct=direct
        )
        for mla, layouts in ((False, mha), (True, mla_layouts))
        for layout in layouts
        for direct in (True, False)
    }
    print(json.dumps({"differences": differences(), "trips": trips}), file=answers, flush=True)
