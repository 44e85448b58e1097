# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The namespace of one rank of one engine.

vLLM's block hashes cover tokens, LoRA names, images and cache salts. The namespace has everything
else that changes the bytes of a block: the model and its weights, types, the declared layout and
packing, the rank, and the engine. Two engines that differ in one of these never share blocks.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from beluga.connectors.naming import major, model_identity
from beluga.errors import ConnectorError
from beluga.kvcache import Namespace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from beluga.connectors.vllm.layout import BlockLayout

HASHES = ("sha256", "sha256_cbor")  # each process seeds the others


def check_hashing(algorithm: str) -> None:
    """Raise ConnectorError if other processes hash the same tokens differently."""
    if algorithm not in HASHES:
        raise ConnectorError(
            f"prefix_caching_hash_algo is {algorithm}: no other process would find a block; "
            "start vLLM with --prefix-caching-hash-algo sha256 (or sha256_cbor)"
        )


def namespace(  # noqa: PLR0913  all named
    config: Any,
    *,
    version: str,
    layout: BlockLayout,
    packing: str,
    layers: Mapping[str, str],
    tp_rank: int,
    pp_rank: int,
    salt: str | bytes,
) -> Namespace:
    """Return the namespace of a rank. ``config`` is a ``VllmConfig``; ``version`` is vLLM's.

    ``layers`` gives the kind of cache of every layer in the cache group; ``packing`` describes what
    the attention backend does inside a page.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return Namespace(
        {
            "engine": "vllm",
            "engine_version": major(version),
            "model": model_identity(model.model, str(model.revision)),
            "model_config": _digest(_config_of(model.hf_config)),
            "weights": f"{config.load_config.load_format} {_dummy_seed(config)}",
            "quantization": str(model.quantization),
            "dtype": str(model.dtype),
            "kv_dtype": str(cache.cache_dtype),
            "block_size": int(cache.block_size),
            "hash": str(cache.prefix_caching_hash_algo),
            "layout": layout.declared,
            "packing": packing,
            "layers": _digest(dict(layers)),
            "device": layout.device,
            "tp": f"{tp_rank}/{parallel.tensor_parallel_size}",
            "pp": f"{pp_rank}/{parallel.pipeline_parallel_size}",
            "cp": f"{parallel.decode_context_parallel_size}"
            f"/{parallel.prefill_context_parallel_size}",
            "group": 0,
        },
        salt=salt,
    )


def adapter_identity(lora: Any) -> bytes:
    """Distinguish a LoRA adapter from others of the same name. Returns b"" for no adapter."""
    return b"" if lora is None else model_identity(str(lora.lora_path), "").encode()


def _config_of(hf_config: Any) -> dict[str, Any]:
    """Return a model's configuration without the fields that do not affect its results."""
    no_matter = ("_name_or_path", "transformers_version")
    return {key: value for key, value in hf_config.to_dict().items() if key not in no_matter}


def _dummy_seed(config: Any) -> str:
    """Return the seed of dummy weights, or "" for real ones."""
    made_up = config.load_config.load_format == "dummy"
    return str(config.model_config.seed) if made_up else ""


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
