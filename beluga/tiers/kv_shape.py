# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The KV cache of a model: how many bytes a token has, by its config.json or by its numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beluga.errors import TierError
from beluga.transfer import DTYPE_SIZES

_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8",
    "float8_e5m2": "FP8",
}
_CONFIG_MAX = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a token adds to the KV cache.

    ``layers`` counts those with attention. A layer has K and V of ``kv_heads`` heads of
    ``head_dim`` elements, or, with MLA, one vector of ``latent_dim`` elements. ``dtype`` is one of
    F32, F16, BF16, FP8, U8.
    """

    layers: int
    dtype: str
    kv_heads: int = 0
    head_dim: int = 0
    latent_dim: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_SIZES:
            raise TierError(f"elements of type {self.dtype}; known are {', '.join(DTYPE_SIZES)}")
        if self.layers < 1 or self.elements < 1:
            raise TierError(
                "a KV cache needs layers, and KV heads with a size, or a latent vector; "
                f"have {self.layers} layers, {self.kv_heads} heads of {self.head_dim}, "
                f"{self.latent_dim} latent elements"
            )

    @property
    def elements(self) -> int:
        """Elements of a token in one layer."""
        return self.latent_dim or 2 * self.kv_heads * self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers."""
        return self.layers * self.elements * DTYPE_SIZES[self.dtype]


def read_model(path: Path, dtype: str | None = None) -> KvShape:
    """Read a model's config.json, or that of a folder.

    ``dtype`` is that of the KV cache, if it is not the model's. Raises TierError.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            text = opened.read(_CONFIG_MAX)
        config = json.loads(text)
    except OSError as error:
        raise TierError(f"cannot read {file}: {error.strerror}; name a folder or file") from None
    except ValueError:
        raise TierError(f"{file} is not JSON") from None
    if not isinstance(config, dict):
        raise TierError(f"{file} is not a model's configuration")
    text_config = config.get("text_config", config.get("llm_config"))
    if isinstance(text_config, dict):  # a model with more than text
        config = {**config, **text_config}
    return _shape(config, file, dtype)


def _shape(config: dict[str, Any], file: Path, dtype: str | None) -> KvShape:
    named = config.get("torch_dtype", config.get("dtype"))
    kind = dtype or _DTYPES.get(str(named).removeprefix("torch."))
    if kind is None:
        raise TierError(f"{file} names no type of elements that is known; give --dtype")
    layers = _layers(config, file)
    rank = _number(config, file, "kv_lora_rank", default=0)
    if rank:
        rope = _number(config, file, "qk_rope_head_dim", default=0)
        return KvShape(layers, kind, latent_dim=rank + rope)
    heads = _number(config, file, "num_attention_heads", "n_head")
    kv_heads = _number(config, file, "num_key_value_heads", default=heads)
    if config.get("multi_query"):
        kv_heads = 1
    size = _number(config, file, "head_dim", default=0)
    if not size:
        size = _number(config, file, "hidden_size", "n_embd") // heads
    return KvShape(layers, kind, kv_heads=kv_heads, head_dim=size)


def _layers(config: dict[str, Any], file: Path) -> int:
    """Count the layers whose KV grows with each token: none of linear attention."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
    return _number(config, file, "num_hidden_layers", "n_layer")


def _number(config: dict[str, Any], file: Path, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            if value or default is not None:
                return value
        elif value is not None:
            raise TierError(f"{file} has {name} = {value!r}, which is not a number")
    if default is None:
        raise TierError(f"{file} has no {' or '.join(names)}; give the numbers by options")
    return default
