# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Compares our overrides with the installed vLLM, and prints incompatibilities.

For each public method that our connector overrides, our signature must allow every call that the
base's signature allows. Abstract methods must all exist.
"""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from beluga.connectors.vllm.connector import BelugaConnector

BASE = type("Base", (KVConnectorBase_V1, SupportsHMA), {})
# Hooks that vLLM calls since 0.33.
SINCE_0_33 = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def narrower(ours: Any, base: Any) -> str:
    """Return what the base's signature accepts and ours does not."""
    mine, theirs = (
        list(inspect.signature(function).parameters.values()) for function in (ours, base)
    )
    for index, wanted in enumerate(theirs):
        if wanted.kind in VARIADIC:
            continue
        if index >= len(mine) or mine[index].kind in VARIADIC:
            if not any(parameter.kind in VARIADIC for parameter in mine):
                return f"has no {wanted.name}"
            continue
        if mine[index].name != wanted.name:
            return f"calls {mine[index].name} what is {wanted.name}"
        if wanted.default is not wanted.empty and mine[index].default is wanted.empty:
            return f"requires {wanted.name}"
    known = {parameter.name for parameter in theirs}
    more = [
        own.name
        for own in mine
        if own.kind not in VARIADIC and own.default is own.empty and own.name not in known
    ]
    # A newer optional parameter of ours is harmless; one without a default is not.
    return f"requires {', '.join(more)}" if more else ""


def misfits() -> list[str]:
    wrong = [f"it lacks {name}" for name in sorted(BelugaConnector.__abstractmethods__)]
    for name in vars(BelugaConnector):
        ours = getattr(BelugaConnector, name)
        if not callable(ours) or (name.startswith("_") and name != "__init__"):
            continue
        if name in SINCE_0_33 and vllm.__version__.startswith("0.32."):
            continue
        if not hasattr(BASE, name):
            wrong.append(f"{name} overrides nothing")
        elif problem := narrower(ours, getattr(BASE, name)):
            wrong.append(f"{name} {problem}")
    return wrong


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


if __name__ == "__main__":
    report = {"version": vllm.__version__, "misfits": misfits(), "extra_keys": extra_keys()}
    print(json.dumps(report))
