# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang as released, without a GPU, over our backend on a pool.

Run it in .venv-adapters: sglang_role.py POOL WHAT [FOLDER SEED]. It prints one line of JSON:

* ``storage``: the methods that differ from SGLang's storage interface, and pages that come back.
* ``weights``: SGLang's own keys, settings and weight updates around a backend.
* ``controller``: SGLang's own HiCacheController in random order over our backend and, for
  comparison, its file backend. Its threads hash, look up, prefetch and back up pages as in a
  server; only the scheduler and the GPU are missing. Each step must have the same outcome with both
  backends, and every prefetched page its bytes. Also the calls that the controller made of our
  backend in a fixed order of steps.
* ``pools``: SGLang's calls for the pools of hybrid models, in random order, on both backends: an
  indexer, a window, states and a draft in addition to the KV, over SGLang's host pools.

SGLang's package and its host pools cannot be imported as a whole here. So the package has only its
path, the pools' methods that lay pages out are read from the source, and empty modules replace what
SGLang imports but that environment lacks (for images and other kinds of weights).
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import queue
import random
import sys
import types
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch

POOL = sys.argv[1]
FOLDER, SEED = Path(*sys.argv[3:4]), int(*sys.argv[4:5])  # of the controller and the pools
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


# ---- Weights

ABSENT = ("torchvision", "IPython", "gguf")  # with the modules in them


def load(name: str) -> Any:
    """Import a module of SGLang's, with empty modules for what it lacks."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in ABSENT:
                raise
            empty = mock.MagicMock(name=error.name)
            empty.__path__, empty.__name__ = [], error.name
            empty.__spec__ = importlib.machinery.ModuleSpec(error.name, None, is_package=True)
            sys.modules[error.name] = empty


updates = load("sglang.srt.managers.scheduler_components.weight_updater")
context = load("sglang.srt.runtime_context").get_context()
RadixKey = load("sglang.srt.mem_cache.radix_cache").RadixKey
get_storage_hash_str = load("sglang.srt.mem_cache.utils").get_storage_hash_str
backend_module = importlib.import_module("beluga.connectors.sglang.backend")


def updater() -> Any:
    """Make SGLang's updater of an idle scheduler, over a model runner that has loaded its
    weights.
    """

    # Scheduler.record_weight_version_change does this
    def renamed(new_version: str | None) -> None:
        if new_version is not None:
            context.override("scheduler.weight_version", weight_version=new_version)

    manager = object.__new__(updates.SchedulerWeightUpdaterManager)
    runner = types.SimpleNamespace(
        weight_updater=types.SimpleNamespace(
            update_weights_from_disk=lambda *_, **__: (True, "loaded")
        )
    )
    manager.tp_worker = types.SimpleNamespace(
        weight_update_runners=lambda: [("target", runner)],
    )
    manager.draft_worker = manager.metrics_collector = None
    manager.flush_cache = lambda **_: True
    manager.scheduler = types.SimpleNamespace(record_weight_version_change=renamed)
    return manager


def update(manager: Any, version: str | None, *, flush_cache: bool = True) -> None:
    requested = types.SimpleNamespace(
        model_path="org/model",
        load_format="auto",
        recapture_cuda_graph=False,
        torch_empty_cache=False,
        weight_version=version,
        flush_cache=flush_cache,
    )
    assert manager.update_weights_from_disk(requested).success


def hashes_of(extra_key: str | None = None, cache_salt: str | None = None) -> list[str]:
    """Return SGLang's keys of the same pages for a LoRA adapter (its id is in the extra key) and
    salt.
    """
    key = RadixKey(list(range(COUNT * PAGE)), extra_key, cache_salt=cache_salt)
    names = list(get_storage_hash_str(key, page_size=PAGE))
    assert len(names) == COUNT
    return names


class WeightsSide:
    """A backend as SGLang attaches it, with pages of random bytes."""

    def __init__(self) -> None:
        pool = HostPool("page_first", mla=False, seed=1)
        self.backend = backend(pool, mla=False, direct=True)

    def put(self, keys: list[str]) -> int:
        return sum(self.backend.batch_set_v1(keys, indices([0, 2, 4, 6])))

    def hits(self, keys: list[str]) -> int:
        hits = sum(self.backend.batch_get_v1(keys, indices([1, 3, 5, 7])))
        assert self.backend.batch_exists(keys) == hits
        return hits


def refusal() -> str:
    """Return the error for a release without namespaces in its keys."""
    backend_module.sglang_version = "0.5.19"
    try:
        WeightsSide()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def weights() -> dict[str, Any]:
    results: dict[str, Any] = {}
    manager, keys = updater(), hashes_of()
    first, other = WeightsSide(), WeightsSide()
    results["put"] = first.put(keys), other.hits(keys)
    results["adapters and salts"] = [
        other.hits(hashes_of(*names)) for names in (("lora",), (None, "salt"), ("lora", "salt"))
    ]
    results["with salt"] = first.put(hashes_of(None, "a")), other.hits(hashes_of(None, "a"))
    results["with another salt"] = other.hits(hashes_of(None, "b")), other.hits(hashes_of("a"))
    first.backend.clear()
    results["cleared"] = first.hits(keys), other.hits(keys), WeightsSide().hits(keys)
    results["put again"] = first.put(keys), other.hits(keys)
    update(manager, "v2")
    results["updated"] = first.hits(keys), first.put(keys), other.hits(keys)
    update(manager, None)
    results["updated without a name"] = first.hits(keys), first.put(keys)
    update(manager, "v3", flush_cache=False)
    results["updated without a flush"] = first.hits(keys), first.put(keys)
    update(manager, "v4")
    results["known again"] = first.hits(keys), first.put(keys), other.hits(keys)
    results["refusal"] = refusal()
    return results


# ---- The controller

STEPS, LONG_S = 60, 60.0
CHAIN = 5  # pages of the longest prompt

cache_controller = load("sglang.srt.managers.cache_controller")
memory_pool = load("sglang.srt.mem_cache.memory_pool")
cache_controller.get_parallel = lambda: types.SimpleNamespace(
    tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
)
cache_controller.is_dp_attention_enabled = lambda: False


class ControllerPool(HostPool):
    """A host pool with what the controller reads of it."""

    storage_format_tag = None
    logical_size = PAGE * PAGE_COUNT

    def fill(self, page: int, key: str) -> None:
        """Write the content of a key to a page."""
        self.set_from_flat_data_page(page * PAGE, content(self, key))

    def has(self, page: int, key: str) -> bool:
        """Return whether a page has exactly the content of a key."""
        return bool(torch.equal(self.get_data_page(page * PAGE).flatten(), content(self, key)))


def content(pool: ControllerPool, key: str) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
    shape = pool.get_dummy_flat_data_page().shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(pool.dtype).flatten()


class DevicePool:
    """A stand-in for a GPU's pool; the tests move no layer through it."""

    device, layer_num = "cpu", LAYERS

    def register_layer_transfer_counter(self, _: Any) -> None:
        pass


class DeviceMlaPool(DevicePool, memory_pool.MLATokenToKVPool):
    """One of MLA, which the controller recognizes by its class."""

    def __init__(self) -> None:
        pass


class Engine:
    """A controller with its host pool, and the scheduler's side of its queues."""

    def __init__(
        self, kind: str, layout: str, *, mla: bool, direct: bool, use: str = "random"
    ) -> None:
        self.pool = ControllerPool(layout, mla=mla, seed=None)
        device = (DeviceMlaPool if mla else DevicePool)()
        settings: dict[str, Any] = {"file_storage_path": str(FOLDER / layout / f"{mla}-{direct}")}
        if kind == "dynamic":
            settings = dict(config(mla=mla, direct=direct).extra_config or {})
            settings["variant"] = f"{layout} {mla} {direct} {use} {SEED}"
        self.controller = cache_controller.HiCacheController(
            types.SimpleNamespace(get_kvcache=lambda: device),
            self.pool,
            PAGE,
            None,
            None,
            storage_backend=kind,
            model_name="org/model",
            storage_backend_extra_config=settings,
        )

    def backup(self, tokens: list[int], last: str | None, pages: list[int]) -> int:
        """Back up pages. Returns how many tokens the storage saved."""
        keys = hashes(tokens, last)
        for page, key in zip(pages, keys, strict=True):
            self.pool.fill(page, key)
        self.controller.write_storage(indices(pages), tokens, keys)
        return int(self.controller.ack_backup_queue.get(timeout=LONG_S).completed_tokens)

    def prefetch(self, tokens: list[int], last: str | None, pages: list[int]) -> tuple[int, int]:
        """Prefetch pages. Returns how many tokens the storage has, and how many were loaded
        correctly.
        """
        operation = self.controller.prefetch("request", tokens, last)
        assert self.controller.prefetch_hit_queue.get(timeout=LONG_S) is operation
        count = operation.storage_hit_count // PAGE
        if not count:
            return 0, 0
        operation.host_indices = indices(pages[:count])
        self.controller.prefetch_buffer.put(operation)
        done = 0
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=LONG_S)).completed_req:
            done = max(done, ack.completed_tokens or 0)
        whole = [self.pool.has(p, k) for p, k in zip(pages, operation.hash_value, strict=False)]
        assert all(whole[: done // PAGE]), "a prefetched page has other bytes"
        return count * PAGE, done

    def close(self) -> None:
        self.controller.detach_storage_backend()


def hashes(tokens: list[int], last: str | None) -> list[str]:
    return list(get_storage_hash_str(RadixKey(tokens), last, page_size=PAGE))


def tokens_of(prompt: int, count: int) -> list[int]:
    return [1000 * prompt + i for i in range(count * PAGE)]


def step(engines: dict[str, Engine], how: dict[str, Any], rng: random.Random) -> tuple[Any, ...]:
    """Do one step with each engine. Returns its name and the outcomes by engine."""
    name = rng.choices(["backup", "prefetch", "clear", "restart"], [10, 12, 1, 1])[0]
    prompt, length = rng.randrange(4), rng.randint(1, CHAIN)
    start = rng.randint(0, length - 1)
    tokens = tokens_of(prompt, length)
    last = hashes(tokens[: start * PAGE], None)[-1] if start else None
    pages = rng.sample(range(PAGE_COUNT), length - start)
    outcomes = []
    for kind, engine in engines.items():
        if name == "clear":
            engine.controller.storage_backend.clear()
            outcomes.append(0)
        elif name == "restart":
            engine.close()
            engines[kind] = Engine(kind, **how)
            outcomes.append(0)
        else:
            outcomes.append(getattr(engine, name)(tokens[start * PAGE :], last, pages))
    return (name, *outcomes)


def random_run(how: dict[str, Any]) -> dict[str, Any]:
    """Return which steps had other outcomes than with the file backend, and what was done."""
    rng = random.Random(f"{SEED} {how}")
    engines = {kind: Engine(kind, **how) for kind in ("file", "dynamic")}
    differ, hits = [], 0
    for number in range(STEPS):
        name, theirs, ours = step(engines, how, rng)
        if theirs != ours:
            differ.append(f"{number}: {name} was {theirs} with files, {ours} here")
        hits += name == "prefetch" and ours[1] > 0
    for engine in engines.values():
        engine.close()
    return {"differ": differ, "hits": hits}


def random_calls() -> list[str]:
    """Call both backends' methods themselves in random order, as no controller does. Returns which
    calls had other results than with the file backend.
    """
    rng, differ = random.Random(SEED), list[str]()
    settings = config(mla=False, direct=False)
    settings.extra_config["variant"] = f"calls {SEED}"  # type: ignore[index]
    theirs_settings = config(mla=False, direct=False)
    theirs_settings.extra_config = {"file_storage_path": str(FOLDER / "calls")}
    pool = ControllerPool("page_first", mla=False, seed=None)
    create = StorageBackendFactory.create_backend
    backends = [create("file", theirs_settings, pool), create("dynamic", settings, pool)]
    for backend in backends:
        backend.register_mem_pool_host(pool)

    def shown(result: Any) -> Any:
        if isinstance(result, list):
            return [shown(each) for each in result]
        return result.view(torch.int16).tolist() if isinstance(result, torch.Tensor) else result

    def call(backend: Any, name: str, keys: list[str]) -> Any:
        pages = [content(pool, key) for key in keys]
        targets = [torch.zeros_like(page) for page in pages]
        if name in ("get", "set", "exists"):
            more = {"get": targets[:1], "set": pages[:1], "exists": []}[name]
            return getattr(backend, name)(keys[0], *more)
        more = {"batch_get": [targets], "batch_set": [pages]}.get(name, [])
        return getattr(backend, name)(keys, *more)

    names = "get", "set", "exists", "batch_get", "batch_set", "batch_exists"
    for number in range(20 * STEPS):
        if rng.random() < 0.02:
            for backend in backends:
                backend.clear()
        name = rng.choice(names)
        keys = [f"{rng.randrange(12):064x}" for _ in range(rng.randint(1, 6))]
        theirs, ours = (shown(call(backend, name, keys)) for backend in backends)
        if theirs != ours:
            differ.append(f"{number}: {name} of {[key[-2:] for key in keys]} differs")
    backends[1].close()
    return differ


def recorded(how: dict[str, Any]) -> list[Any]:
    """Return the controller's calls of our backend, and their results, in a fixed order of steps:
    keys as numbers, host indices as pages.
    """
    engine, calls, keys = Engine("dynamic", **how, use="recorded"), list[Any](), dict[str, int]()
    backend = engine.controller.storage_backend
    names = "batch_exists", "batch_get_v1", "batch_set_v1", "batch_get", "batch_set", "clear"

    def watch(name: str) -> None:
        call = getattr(backend, name)

        def watched(*arguments: Any) -> Any:
            result = call(*arguments)
            row: list[Any] = [name]
            if arguments:
                row.append([keys.setdefault(key, len(keys)) for key in arguments[0]])
            if name.endswith("_v1"):
                row.append([int(i) // PAGE for i in arguments[1][::PAGE]])
            shown = [r is not None for r in result] if name == "batch_get" else result
            calls.append([*row, shown])
            return result

        setattr(backend, name, watched)

    for name in names:
        watch(name)
    first, second = tokens_of(1, 3), tokens_of(2, 2)
    engine.prefetch(first, None, [0, 1, 2])
    engine.backup(first, None, [1, 2, 3])
    engine.prefetch(first, None, [4, 5, 6])
    engine.backup(first[: 2 * PAGE], None, [0, 1])  # again
    engine.prefetch(tokens_of(1, 4), None, [0, 1, 2, 3])  # one more than exists
    # The parent of these pages is the last page of ``first``.
    engine.backup(second, hashes(first, None)[-1], [6, 7])
    engine.prefetch(second, hashes(first, None)[-1], [0, 1])
    backend.clear()
    engine.prefetch(first, None, [0, 1, 2])
    engine.close()
    return calls


# ---- The pools of hybrid models

POOLS_STEPS, KEYS, WINDOW = 250, 8, 2

storage = load("sglang.srt.mem_cache.hicache_storage")
states = load("sglang.srt.mem_cache.pool_host.mamba")
logical = load("sglang.srt.mem_cache.memory_pool_host").LogicalHostPool
Policy, Transfer = storage.PoolHitPolicy, storage.PoolTransfer

# The pools in addition to the KV, and how many of a prefix's last pages a hit needs; 0 is all.
NEEDS = {"indexer": 0, "swa": WINDOW, "mamba": 1, "draft": 0}


def state_pool(layout: str) -> Any:
    """Make SGLang's own host pool of states, of two layers."""
    info = states.MambaStateBufferInfo(
        temporal=torch.zeros(2, 4, 3, 5, dtype=torch.float32),
        conv=(torch.zeros(2, 4, 6, 3, dtype=torch.bfloat16),),
    )
    return states.MambaPoolHost(
        info, 2.0, 0, device_capacity=PAGE_COUNT, pin_memory=False, layout=layout
    )


class PoolsSide:
    """One backend with host pools of its own."""

    def __init__(self, kind: str, layout: str, *, has_kv: bool) -> None:
        kv = ControllerPool(layout, mla=False, seed=None)
        self.kv = kv if has_kv else logical(kv.size, PAGE, layout)
        self.pools = {
            "indexer": ControllerPool("page_first", mla=True, seed=None),
            "swa": ControllerPool(layout, mla=False, seed=None),
            "mamba": state_pool("page_first" if layout == "layer_first" else layout),
            "draft": ControllerPool(layout, mla=False, seed=None),
        }
        settings = config(mla=False, direct=not has_kv)
        if kind == "file":
            extra = {"file_storage_path": str(FOLDER / f"{layout}-{has_kv}")}
        else:
            extra = {**(settings.extra_config or {}), "variant": f"{layout} {SEED} {has_kv}"}
        settings = dataclasses.replace(settings, extra_config=extra)
        create = StorageBackendFactory.create_backend
        self.backend = create(kind, settings, self.kv)
        self.backend.register_mem_pool_host(self.kv)
        for name, pool in self.pools.items():
            self.backend.register_mem_host_pool_v2(pool, storage.PoolName(name))
        self.backend.on_host_pools_registered()
        if kind != "file":
            assert self.backend._identity.wait(60)

    def transfer(self, name: str, keys: list[str], pages: list[int]) -> Any:
        pool = self.pools[name]
        spots = [torch.arange(p * pool.page_size, (p + 1) * pool.page_size) for p in pages]
        return Transfer(storage.PoolName(name), host_indices=torch.cat(spots), keys=keys)

    def set(self, name: str, keys: list[str], pages: list[int]) -> Any:
        pool = self.pools[name]
        for key, page in zip(keys, pages, strict=True):
            pool.set_from_flat_data_page(page * pool.page_size, page_in(pool, name, key))
        return self.backend.batch_set_v2([self.transfer(name, keys, pages)])

    def get(self, name: str, keys: list[str], pages: list[int]) -> Any:
        pool = self.pools[name]
        for page in range(PAGE_COUNT):
            blank = torch.zeros_like(page_in(pool, name, ""))
            pool.set_from_flat_data_page(page * pool.page_size, blank)
        results = self.backend.batch_get_v2([self.transfer(name, keys, pages)])
        for key, page, there in zip(keys, pages, results[name], strict=True):
            fetched = pool.get_data_page(page * pool.page_size, flat=True)
            assert not there or torch.equal(fetched, page_in(pool, name, key)), "other bytes"
        return results

    def set_kv(self, keys: list[str]) -> Any:
        pages = [content(self.kv, key) for key in keys]
        return self.backend.batch_set(keys, pages)

    def exists(self, keys: list[str], names: list[str]) -> Any:
        requests = []
        for name in names:
            last = NEEDS[name]
            policy = Policy.TRAILING_PAGES if last else Policy.ALL_PAGES
            requests.append(
                Transfer(storage.PoolName(name), keys=keys[: last or None], hit_policy=policy)
            )
        result = self.backend.batch_exists_v2(keys, requests)
        hits = {str(name): pages for name, pages in result.extra_pool_hit_pages.items()}
        return result.kv_hit_pages, hits, result.restorable_prefix_pages


def page_in(pool: Any, name: str, key: str) -> torch.Tensor:
    """Return the page of a key in a pool."""
    like = pool.get_dummy_flat_data_page()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {key}".encode()))
    random_bytes = torch.randint(0, 100, like.shape, generator=generator)
    return random_bytes.to(like.dtype).flatten()


def pools_run(layout: str, *, has_kv: bool) -> dict[str, Any]:
    rng = random.Random(f"{SEED} {layout}")
    sides = [PoolsSide(kind, layout, has_kv=has_kv) for kind in ("file", "dynamic")]
    keys = [f"{number:064x}" for number in range(KEYS)]
    differ, restored = list[str](), 0
    for number in range(POOLS_STEPS):
        count = rng.randint(1, KEYS)
        chosen = sorted(rng.sample(range(KEYS), count))
        pages = rng.sample(range(PAGE_COUNT), count)
        name = rng.choice(list(NEEDS))
        what = rng.choices(["set", "get", "set_kv", "exists", "clear"], [6, 4, 2, 8, 0.3])[0]
        arguments: tuple[Any, ...] = ()
        if what in ("set", "get"):
            arguments = name, [keys[i] for i in chosen], pages
        elif what == "set_kv":
            arguments = (keys[:count],)
        elif what == "exists":
            arguments = keys, rng.sample(list(NEEDS), rng.randint(0, len(NEEDS)))
        if what == "clear":
            for side in sides:
                side.backend.clear()
            continue
        if what in ("set_kv", "exists") and not has_kv:
            continue  # SGLang's file backend has no pool without KV
        theirs, ours = (getattr(side, what)(*arguments) for side in sides)
        if what == "exists":
            theirs = theirs[0], theirs[1] if theirs[2] else ours[1], theirs[2]
        if theirs != ours:
            differ.append(f"{number}: {what} {arguments[-1]} was {theirs} with files, {ours} here")
        restored += what == "exists" and ours[0] > 0
    sides[1].backend.close()
    return {"differ": differ, "restored": restored}


def without_kv() -> list[Any]:
    """Return the results for a KV pool without bytes: its pages are always hits, and the others
    decide.
    """
    side = PoolsSide("dynamic", "page_first", has_kv=False)
    keys, pages = [f"{number:064x}" for number in range(4)], [0, 1, 2, 3]
    results = [side.exists(keys, ["indexer"])]
    side.set("indexer", keys[:3], pages[:3])
    side.set("mamba", keys[1:2], [1])
    results += [side.exists(keys, ["indexer"]), side.exists(keys, ["indexer", "mamba"])]
    tokens = indices(pages)
    results.append(side.backend.batch_set_v1(keys, tokens))
    results.append(side.backend.batch_get_v1(keys, tokens))
    side.backend.close()
    return results


def storage_report() -> dict[str, Any]:
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
    return {"differences": differences(), "trips": trips}


def weights_report() -> dict[str, Any]:
    with context.override_server_args(weight_version="v1"):
        return weights()


def controller_report() -> dict[str, Any]:
    shapes = [(False, "layer_first"), (False, "page_first"), (True, "page_first_direct")]
    ways = [
        {"layout": layout, "mla": mla, "direct": direct}
        for mla, layout in shapes
        for direct in (True, False)
    ]
    try:
        return {
            "differ": random_calls(),
            "runs": {str(how): random_run(how) for how in ways},
            "calls": {
                word: recorded({"layout": "page_first", "mla": False, "direct": direct})
                for word, direct in (("in place", True), ("flat", False))
            },
        }
    except queue.Empty:
        sys.exit("SGLang's controller did not answer")


def pools_report() -> dict[str, Any]:
    layouts = ("layer_first", "page_first", "page_first_direct")
    return {
        "runs": {layout: pools_run(layout, has_kv=True) for layout in layouts},
        "without KV": without_kv(),
    }


REPORTS = {
    "storage": storage_report,
    "weights": weights_report,
    "controller": controller_report,
    "pools": pools_report,
}

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        print(json.dumps(REPORTS[sys.argv[2]]()), file=answers, flush=True)
    finally:
        if sys.argv[2] == "pools":  # its backends of files are not closed
            os._exit(0)
