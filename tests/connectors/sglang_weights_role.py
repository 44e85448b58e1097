# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's own keys, settings and weight updates around a backend on a pool, without a GPU.

Run it in .venv-adapters: sglang_weights_role.py POOL. It prints the results as one line of JSON.
Empty modules replace what SGLang imports but that environment lacks (for images and other kinds of
weights).
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import sys
import types
from typing import Any
from unittest import mock

import sglang_role as role  # this leaves SGLang's package importable by parts

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


def hashes(extra_key: str | None = None, cache_salt: str | None = None) -> list[str]:
    """Return SGLang's keys of the same pages for a LoRA adapter (its id is in the extra key) and
    salt.
    """
    key = RadixKey(list(range(role.COUNT * role.PAGE)), extra_key, cache_salt=cache_salt)
    hashes = get_storage_hash_str(key, page_size=role.PAGE)
    assert len(hashes) == role.COUNT
    return list(hashes)


class Side:
    """A backend as SGLang attaches it."""

    def __init__(self) -> None:
        pool = role.HostPool("page_first", mla=False, seed=1)
        self.backend = role.backend(pool, mla=False, direct=True)

    def put(self, keys: list[str]) -> int:
        return sum(self.backend.batch_set_v1(keys, role.indices([0, 2, 4, 6])))

    def hits(self, keys: list[str]) -> int:
        hits = sum(self.backend.batch_get_v1(keys, role.indices([1, 3, 5, 7])))
        assert self.backend.batch_exists(keys) == hits
        return hits


def refusal() -> str:
    """Return the error for a release without namespaces in its keys."""
    backend_module.sglang_version = "0.5.19"
    try:
        Side()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run() -> dict[str, Any]:
    results: dict[str, Any] = {}
    manager, keys = updater(), hashes()
    first, other = Side(), Side()
    results["put"] = first.put(keys), other.hits(keys)
    results["adapters and salts"] = [
        other.hits(hashes(*names)) for names in (("lora",), (None, "salt"), ("lora", "salt"))
    ]
    results["with salt"] = first.put(hashes(None, "a")), other.hits(hashes(None, "a"))
    results["with another salt"] = other.hits(hashes(None, "b")), other.hits(hashes("a"))
    first.backend.clear()
    results["cleared"] = first.hits(keys), other.hits(keys), Side().hits(keys)
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


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with context.override_server_args(weight_version="v1"):
        print(json.dumps(run()), file=answers, flush=True)
