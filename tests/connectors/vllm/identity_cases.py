# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines that differ in one property, and the part of the identity that contains it.

``identity_role.py`` starts them in a real vLLM. All use one tiny model, changed by each case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

BLOCK_TOKENS = 32
TOKENS = 4 * BLOCK_TOKENS
HEAD_SIZE = 32
LONG = 1024  # a longest context beyond the one for which LongRoPE has its short factors
SHORT = 256

_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * (HEAD_SIZE // 2),
    "long_factor": [4.0] * (HEAD_SIZE // 2),
    "original_max_position_embeddings": SHORT,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": SHORT,
}


@dataclasses.dataclass(frozen=True)
class Drop:
    """Parts of the identity: fields of a namespace, fields of vLLM's configuration (by class), and
    whether an adapter's bytes are in the names of blocks.
    """

    fields: tuple[str, ...] = ()
    table: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    adapter: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """An engine: how its model and its options differ from the usual ones.

    It computes other bytes than the engine of ``base``, and ``drop`` has all that distinguishes the
    two. Without a drop it computes the same bytes and shares them.
    """

    base: str = "usual"
    model: str = ""  # a change of the model's files (identity_role.py)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adapter: int = 0  # the seed of its weights
    drop: Drop | None = None


def _rope(parameters: Mapping[str, Any], longest: int) -> dict[str, Any]:
    return {"hf_overrides": {"rope_parameters": parameters}, "max_model_len": longest}


def _overridden(name: str) -> Drop:
    return Drop(table={"PretrainedConfig": (name,), "ModelConfig": ("hf_overrides",)})


CASES: dict[str, Case] = {
    "usual": Case(),
    "another folder": Case(model="copy"),
    "limits": Case(
        options={
            "max_num_seqs": 3,
            "kv_cache_memory_bytes": 8 << 20,
            "served_model_name": "other",
            "disable_log_stats": True,
        }
    ),
    "bytes in the middle of the weights": Case(model="middle", drop=Drop(("weights",))),
    "theta": Case(
        options={"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        drop=_overridden("rope_parameters"),
    ),
    "epsilon": Case(
        options={"hf_overrides": {"rms_norm_eps": 0.1}},
        drop=_overridden("rms_norm_eps"),
    ),
    "configuration in the model's folder": Case(
        model="theta",
        drop=Drop(("weights",), {"PretrainedConfig": ("rope_parameters",)}),
    ),
    "dtype": Case(
        options={"dtype": "bfloat16"},  # for which a CPU with AMX has other kernels
        drop=Drop(("dtype", "layout", "layers", "packing"), {"ModelConfig": ("dtype",)}),
    ),
    "longrope": Case(options=_rope(_LONG_ROPE, SHORT), drop=Drop(("config model_config",))),
    "longrope of a long context": Case(
        base="longrope",
        options=_rope(_LONG_ROPE, LONG),
        drop=Drop(("config model_config", "max_model_len")),
    ),
    "yarn": Case(options=_rope(_YARN, SHORT), drop=Drop(("config model_config",))),
    "a branch of the hub": Case(model="branch"),
    "a branch that has moved": Case(model="moved", drop=Drop(("weights",))),
    "kv dtype": Case(
        options={"kv_cache_dtype": "fp8"},
        drop=Drop(("kv_dtype", "layout", "layers"), {"CacheConfig": ("cache_dtype",)}),
    ),
    "an adapter": Case(base="an adapter", adapter=1),
    "an adapter of this name with other bytes": Case(
        base="an adapter", adapter=2, drop=Drop(adapter=True)
    ),
}

# Fields that no two of these engines differ in, and why none can.
NOT_SHOWN = {
    **dict.fromkeys(("tp", "pp", "cp"), "needs several ranks"),
    **dict.fromkeys(("device", "engine", "engine_version"), "one CPU and one vLLM"),
    **dict.fromkeys(("block_size", "hash"), "other hashes of the same tokens"),
    **dict.fromkeys(("quantization", "environment"), "needs kernels that this CPU may lack"),
    "group": "always 0",
}
