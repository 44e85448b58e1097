# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's own HiCacheController in random order over our backend and, for comparison, its file
backend.

Run it in .venv-adapters: sglang_controller_role.py POOL FOLDER SEED. The controller's threads hash,
look up, prefetch and back up pages as in a server; only the scheduler and the GPU are missing. Each
step must have the same outcome with both backends, and every prefetched page its bytes. It prints
what differed, and the calls that the controller made of our backend in a fixed order of steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import random
import sys
import types
from pathlib import Path
from typing import Any

import sglang_role as role
import sglang_weights_role as parts
import torch
from sglang_role import LAYERS, PAGE, PAGE_COUNT

FOLDER, SEED = Path(sys.argv[2]), int(sys.argv[3])
STEPS, LONG_S = 60, 60.0
CHAIN = 5  # pages of the longest prompt

cache_controller = parts.load("sglang.srt.managers.cache_controller")
memory_pool = parts.load("sglang.srt.mem_cache.memory_pool")
cache_controller.get_parallel = lambda: types.SimpleNamespace(
    tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
)
cache_controller.is_dp_attention_enabled = lambda: False


class HostPool(role.HostPool):
    """A host pool with what the controller reads of it."""

    storage_format_tag = None
    logical_size = PAGE * PAGE_COUNT

    def fill(self, page: int, key: str) -> None:
        """Write the content of a key to a page."""
        self.set_from_flat_data_page(page * PAGE, content(self, key))

    def has(self, page: int, key: str) -> bool:
        """Return whether a page has exactly the content of a key."""
        return bool(torch.equal(self.get_data_page(page * PAGE).flatten(), content(self, key)))


def content(pool: HostPool, key: str) -> torch.Tensor:
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
        self.pool = HostPool(layout, mla=mla, seed=None)
        device = (DeviceMlaPool if mla else DevicePool)()
        settings: dict[str, Any] = {"file_storage_path": str(FOLDER / layout / f"{mla}-{direct}")}
        if kind == "dynamic":
            settings = dict(role.config(mla=mla, direct=direct).extra_config or {})
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
        self.controller.write_storage(role.indices(pages), tokens, keys)
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
        operation.host_indices = role.indices(pages[:count])
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
    hashes = parts.get_storage_hash_str(parts.RadixKey(tokens), last, page_size=PAGE)
    return list(hashes)


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
    settings = role.config(mla=False, direct=False)
    settings.extra_config["variant"] = f"calls {SEED}"  # type: ignore[index]
    theirs_settings = role.config(mla=False, direct=False)
    theirs_settings.extra_config = {"file_storage_path": str(FOLDER / "calls")}
    pool = HostPool("page_first", mla=False, seed=None)
    create = role.StorageBackendFactory.create_backend
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


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    shapes = [(False, "layer_first"), (False, "page_first"), (True, "page_first_direct")]
    ways = [
        {"layout": layout, "mla": mla, "direct": direct}
        for mla, layout in shapes
        for direct in (True, False)
    ]
    try:
        print(
            json.dumps(
                {
                    "differ": random_calls(),
                    "runs": {str(how): random_run(how) for how in ways},
                    "calls": {
                        word: recorded({"layout": "page_first", "mla": False, "direct": direct})
                        for word, direct in (("in place", True), ("flat", False))
                    },
                }
            ),
            file=answers,
            flush=True,
        )
    except queue.Empty:
        sys.exit("SGLang's controller did not answer")
