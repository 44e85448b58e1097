# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's calls for the pools of hybrid models, in random order, on our backend and on SGLang's
own file backend: an indexer, a window, states and a draft in addition to the KV, over SGLang's host
pools.

Run it in .venv-adapters: sglang_pools_role.py POOL FOLDER SEED. It prints what differed, and how
often a prefix was restored.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import sglang_controller_role as controller
import sglang_role as role
import sglang_weights_role as parts
import torch

FOLDER, SEED = Path(sys.argv[2]), int(sys.argv[3])
STEPS, KEYS, WINDOW = 250, 8, 2

storage = parts.load("sglang.srt.mem_cache.hicache_storage")
states = parts.load("sglang.srt.mem_cache.pool_host.mamba")
logical = parts.load("sglang.srt.mem_cache.memory_pool_host").LogicalHostPool
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
        info, 2.0, 0, device_capacity=role.PAGE_COUNT, pin_memory=False, layout=layout
    )


class Side:
    """One backend with host pools of its own."""

    def __init__(self, kind: str, layout: str, *, has_kv: bool) -> None:
        kv = controller.HostPool(layout, mla=False, seed=None)
        self.kv = kv if has_kv else logical(kv.size, role.PAGE, layout)
        self.pools = {
            "indexer": controller.HostPool("page_first", mla=True, seed=None),
            "swa": controller.HostPool(layout, mla=False, seed=None),
            "mamba": state_pool("page_first" if layout == "layer_first" else layout),
            "draft": controller.HostPool(layout, mla=False, seed=None),
        }
        settings = role.config(mla=False, direct=not has_kv)
        if kind == "file":
            extra = {"file_storage_path": str(FOLDER / f"{layout}-{has_kv}")}
        else:
            extra = {**(settings.extra_config or {}), "variant": f"{layout} {SEED} {has_kv}"}
        settings = dataclasses.replace(settings, extra_config=extra)
        create = role.StorageBackendFactory.create_backend
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
            pool.set_from_flat_data_page(page * pool.page_size, content(pool, name, key))
        return self.backend.batch_set_v2([self.transfer(name, keys, pages)])

    def get(self, name: str, keys: list[str], pages: list[int]) -> Any:
        pool = self.pools[name]
        for page in range(role.PAGE_COUNT):
            blank = torch.zeros_like(content(pool, name, ""))
            pool.set_from_flat_data_page(page * pool.page_size, blank)
        results = self.backend.batch_get_v2([self.transfer(name, keys, pages)])
        for key, page, there in zip(keys, pages, results[name], strict=True):
            fetched = pool.get_data_page(page * pool.page_size, flat=True)
            assert not there or torch.equal(fetched, content(pool, name, key)), "other bytes"
        return results

    def set_kv(self, keys: list[str]) -> Any:
        pages = [controller.content(self.kv, key) for key in keys]
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


def content(pool: Any, name: str, key: str) -> torch.Tensor:
    """Return the page of a key in a pool."""
    like = pool.get_dummy_flat_data_page()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {key}".encode()))
    random_bytes = torch.randint(0, 100, like.shape, generator=generator)
    return random_bytes.to(like.dtype).flatten()


def run(layout: str, *, has_kv: bool) -> dict[str, Any]:
    rng = random.Random(f"{SEED} {layout}")
    sides = [Side(kind, layout, has_kv=has_kv) for kind in ("file", "dynamic")]
    keys = [f"{number:064x}" for number in range(KEYS)]
    differ, restored = list[str](), 0
    for number in range(STEPS):
        count = rng.randint(1, KEYS)
        chosen = sorted(rng.sample(range(KEYS), count))
        pages = rng.sample(range(role.PAGE_COUNT), count)
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
    side = Side("dynamic", "page_first", has_kv=False)
    keys, pages = [f"{number:064x}" for number in range(4)], [0, 1, 2, 3]
    results = [side.exists(keys, ["indexer"])]
    side.set("indexer", keys[:3], pages[:3])
    side.set("mamba", keys[1:2], [1])
    results += [side.exists(keys, ["indexer"]), side.exists(keys, ["indexer", "mamba"])]
    indices = role.indices(pages)
    results.append(side.backend.batch_set_v1(keys, indices))
    results.append(side.backend.batch_get_v1(keys, indices))
    side.backend.close()
    return results


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        layouts = ("layer_first", "page_first", "page_first_direct")
        print(
            json.dumps(
                {
                    "runs": {layout: run(layout, has_kv=True) for layout in layouts},
                    "without KV": without_kv(),
                }
            ),
            file=answers,
            flush=True,
        )
    finally:
        answers.flush()
        os._exit(0)
