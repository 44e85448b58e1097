# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The data that vLLM passes to a connector, as far as the connector uses it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

BLOCK_TOKENS = 4
COMMIT = "c0ffee" + 34 * "0"  # a commit of the hub


class Tensor:
    """A view of numpy memory with torch's names."""

    def __init__(self, array: np.ndarray, dtype: str = "torch.bfloat16") -> None:
        self.array, self.dtype = array, dtype
        self.shape = array.shape
        self.device = SimpleNamespace(type="cpu")

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> Tensor:
        return self


def layer_major(layers: int, blocks: int, *page: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return one tensor per layer over memory with the axes (layer, block, *page), and that
    memory.
    """
    memory = np.zeros((layers, blocks, *page), dtype=np.uint16)
    return {f"layer.{i}": Tensor(memory[i]) for i in range(layers)}, memory


def request(
    name: str,
    tokens: list[int],
    *,
    salt: str = "",
    lora: Any = None,
    images: Sequence[tuple[str, int]] = (),
) -> Any:
    """Make a request whose blocks are hashed in a chain as in vLLM. Images are identifiers, each
    with the token where it begins.
    """
    made = SimpleNamespace(
        request_id=name,
        all_token_ids=list(tokens),
        block_hashes=[],
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        num_nans_in_logits=0,
        lora_request=lora,
        cache_salt=salt or None,
        mm_features=[image(*description) for description in images],
    )
    extend(made, [])
    return made


def no_extra_keys(_: Any, start: int, stop: int) -> list[None]:
    """Return the extra keys of blocks that have none."""
    return [None] * (stop - start)


def extend(made: Any, tokens: list[int]) -> None:
    """Add tokens, and the hashes of the blocks that they complete."""
    made.all_token_ids += tokens
    made.num_tokens = len(made.all_token_ids)
    while len(made.block_hashes) < made.num_tokens // BLOCK_TOKENS:
        at = len(made.block_hashes) * BLOCK_TOKENS
        parent = made.block_hashes[-1] if made.block_hashes else (made.cache_salt or "").encode()
        images = [(feature.identifier, feature.mm_position.offset) for feature in made.mm_features]
        shown = [(name, token - at) for name, token in images if token >= at]
        block = repr((made.all_token_ids[at : at + BLOCK_TOKENS], shown)).encode()
        made.block_hashes.append(hashlib.sha256(parent + block).digest())


def spec(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    """Make a KV cache spec of that class name."""
    given = {"num_kv_heads": 2, "head_size": 8, "dtype": "torch.bfloat16", "page_size_bytes": 64}
    return type(kind, (), given | fields)()


def cache_config(*specs: Any, num_blocks: int = 8, layers: int = 2) -> Any:
    """Make a ``KVCacheConfig`` with a group for each spec."""
    return SimpleNamespace(
        num_blocks=num_blocks,
        hash_block_size=BLOCK_TOKENS,
        kv_cache_layout="LBHNC",
        kv_cache_groups=[
            SimpleNamespace(layer_names=[f"layer.{i}" for i in range(layers)], kv_cache_spec=spec)
            for spec in specs
        ],
    )


class PretrainedConfig:
    """A model's configuration as transformers keeps it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self._fields)


def image(identifier: str, offset: int) -> Any:
    """Make an image of a request: the name that vLLM gives it, and the token where it begins."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset))


def config(**changes: Any) -> Any:
    """Make a ``VllmConfig``. The keys of ``changes`` are the last parts of settings' names."""
    hf = {"hidden_size": 64, "_name_or_path": "/somewhere", **changes.pop("hf", {})}
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "org/model",
            "revision": COMMIT,
            "quantization": None,
            "dtype": "torch.bfloat16",
            "seed": 0,
            "max_model_len": 4096,
            "trust_remote_code": False,
        },
        "load_config": {"load_format": "auto", "download_dir": "/nowhere"},
        "cache_config": {
            "cache_dtype": "auto",
            "block_size": BLOCK_TOKENS,
            "prefix_caching_hash_algo": "sha256",
        },
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "device_config": {"device_type": "cuda"},
        "compilation_config": {"static_forward_context": {}},
    }
    known = {name for fields in sections.values() for name in fields}
    assert changes.keys() <= known, changes.keys() - known
    made = {
        part: _part(part)(**{name: changes.get(name, value) for name, value in fields.items()})
        for part, fields in sections.items()
    }
    made["model_config"].hf_config = PretrainedConfig(hf)
    return _part("vllm_config")(**made)


def _part(name: str) -> Any:
    """Return a class with the name that vLLM's has."""
    return type("".join(map(str.capitalize, name.split("_"))), (SimpleNamespace,), {})


def adapter(folder: Path, name: str, content: bytes = b"1", **fields: Any) -> Any:
    """Make a LoRA adapter with these bytes."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return SimpleNamespace(
        **{"lora_name": name, "lora_path": str(folder), "lora_int_id": 1} | fields
    )
