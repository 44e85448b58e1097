# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Compares our overrides with the vLLM that this Python imports, and prints what does not fit.

For each public method that a class of ours overrides, our signature must allow every call that the
base's signature allows. Abstract methods must all exist. The offloading spec must refuse the
configurations that it cannot serve.
"""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.kv_offload import base as offload

from beluga.connectors.vllm import manager, offloading
from beluga.connectors.vllm.connector import BelugaConnector
from beluga.errors import ConnectorError

PAIRS = (
    (BelugaConnector, type("Base", (KVConnectorBase_V1, SupportsHMA), {})),
    (manager.BelugaManager, offload.OffloadingManager),
    (offloading.BelugaWorker, offload.OffloadingWorker),
    (offloading.BelugaOffloadingSpec, offload.OffloadingSpec),
)
MADE_BY_VLLM = (BelugaConnector, offloading.BelugaOffloadingSpec)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def narrower(ours: Any, base: Any) -> str:
    """Return what the base's signature accepts and ours does not."""
    mine, theirs = (
        list(inspect.signature(function).parameters.values()) for function in (ours, base)
    )
    for place, wanted in enumerate(theirs):
        if wanted.kind in VARIADIC:
            continue
        if place >= len(mine) or mine[place].kind in VARIADIC:
            if not any(one.kind in VARIADIC for one in mine):
                return f"has no {wanted.name}"
            continue
        if mine[place].name != wanted.name:
            return f"calls {mine[place].name} what is {wanted.name}"
        if wanted.default is not wanted.empty and mine[place].default is wanted.empty:
            return f"requires {wanted.name}"
    known = {one.name for one in theirs}
    more = [
        one.name
        for one in mine
        if one.kind not in VARIADIC and one.default is one.empty and one.name not in known
    ]
    # A newer optional parameter of ours is harmless; one without a default is not.
    return f"requires {', '.join(more)}" if more else ""


def misfits() -> list[str]:
    wrong = []
    for ours, base in PAIRS:
        wrong += [f"{ours.__name__} lacks {name}" for name in sorted(ours.__abstractmethods__)]
        for name in vars(ours):
            if not callable(getattr(ours, name)) or (name.startswith("_") and name != "__init__"):
                continue
            if not hasattr(base, name):
                wrong.append(f"{ours.__name__}.{name} overrides nothing")
                continue
            compared = name != "__init__" or ours in MADE_BY_VLLM
            problem = narrower(getattr(ours, name), getattr(base, name)) if compared else ""
            if problem:
                wrong.append(f"{ours.__name__}.{name} {problem}")
    return wrong


def not_refused() -> list[str]:
    """Return configurations that the spec should not have accepted."""
    taken = []
    for extra, groups in (
        ({"blocks_per_chunk": 2}, 1),
        ({"block_size": 256}, 1),
        ({"canonical_layout": True}, 1),
        ({"sync_load_budget_bytes": 1 << 20}, 1),
        ({"polo": "a"}, 1),
        ({}, 2),
    ):
        try:
            offloading.BelugaOffloadingSpec(_config(extra, groups))
        except ConnectorError:
            continue
        taken.append(f"{extra} with {groups} groups")
    offloading.BelugaOffloadingSpec(_config({"pool": "a", "spec_name": "x"}, 1))
    for change in (
        {"kv_load_failure_policy": "fail"},
        {"prefix_caching_hash_algo": "xxhash"},
        {"lora_config": object()},
        {"is_multimodal_model": True},
    ):
        try:
            offloading.check_engine(_engine(**change))
        except ConnectorError:
            continue
        taken.append(str(change))
    offloading.check_engine(_engine())
    return taken


def extra_keys() -> list[Any]:
    """Return the extra keys that we announce for two blocks of a request with an adapter, an image
    and a salt.
    """
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=1, length=2))
    request: Any = SimpleNamespace(
        lora_request=SimpleNamespace(lora_name="tuned", lora_path="p"),
        mm_features=[image],
        cache_salt="salt",
        prompt_embeds=None,
    )
    connector: Any = SimpleNamespace(_block_size=4)
    return BelugaConnector._extra_keys_of(connector, request, 0, 2)


def _config(extra: dict[str, Any], groups: int) -> Any:
    return SimpleNamespace(
        extra_config=extra,
        enable_kv_cache_events=False,
        groups=[SimpleNamespace(tokens_per_block=16)] * groups,
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
    )


def _engine(
    kv_load_failure_policy: str = "recompute",
    prefix_caching_hash_algo: str = "sha256",
    lora_config: Any = None,
    is_multimodal_model: bool = False,
) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(is_multimodal_model=is_multimodal_model),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=prefix_caching_hash_algo),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=kv_load_failure_policy),
        lora_config=lora_config,
    )


if __name__ == "__main__":
    found = {
        "version": vllm.__version__,
        "misfits": misfits(),
        "not_refused": not_refused(),
        "extra_keys": extra_keys(),
    }
    print(json.dumps(found))
