# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The KV cache size of a model: bytes per token, from its config.json or from given numbers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beluga.errors import TierError
from beluga.text import decode_text
from beluga.tiers.model_layers import read_layers
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
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
_OF_KV_HEADS = re.compile(r"kv_?heads|key_value_heads|kv_n_heads|head_kv")


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV cache of one token.

    ``layers`` counts the layers whose KV grows with each token. A layer has K and V of ``kv_heads``
    heads of ``head_dim`` elements or, with MLA, one vector of ``latent_dim`` elements. ``dtype`` is
    one of F32, F16, BF16, FP8, U8. In addition, a sequence may have ``window_layers`` that keep its
    last ``window_tokens`` tokens, and ``state_layers`` with a state of fixed size.
    """

    layers: int
    dtype: str
    kv_heads: int = 0
    head_dim: int = 0
    latent_dim: int = 0
    window_layers: int = 0
    window_tokens: int = 0
    state_layers: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_SIZES:
            raise TierError(
                f"there is no element type {self.dtype}; give one of {', '.join(DTYPE_SIZES)}"
            )
        if self.layers < 1 or self.elements < 1:
            raise TierError(
                "a KV cache needs layers, and KV heads with a size or a latent vector, but has "
                f"{self.layers} layers, {self.kv_heads} heads of {self.head_dim}, "
                f"{self.latent_dim} latent elements; give the missing ones"
            )

    @property
    def elements(self) -> int:
        """Elements per token in one layer."""
        return self.latent_dim or 2 * self.kv_heads * self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token in all layers whose KV grows."""
        return self.layers * self.elements * DTYPE_SIZES[self.dtype]

    @property
    def window_bytes(self) -> int:
        """The most bytes per sequence in layers with a window."""
        size = self.elements * DTYPE_SIZES[self.dtype]
        return self.window_layers * self.window_tokens * size

    @property
    def beside(self) -> str:
        """A description of the KV that does not grow; empty if there is none."""
        parts = []
        if self.window_layers:
            parts.append(
                f"{self.window_layers} layers keep the last {self.window_tokens:,} tokens, at most "
                f"{self.window_bytes:,} bytes a sequence"
            )
        if self.state_layers:
            parts.append(f"{self.state_layers} layers have a state of fixed size, not counted here")
        return "; ".join(parts)


def read_model(path: Path, dtype: str | None = None) -> KvShape:
    """Read a model's config.json, given the file or its folder.

    ``dtype`` overrides the type of the KV cache. Raises TierError.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            text = opened.read(_CONFIG_MAX)
        config = json.loads(decode_text(text))
    except OSError as error:
        raise TierError(f"cannot read {file}: {error.strerror}; name a folder or file") from None
    except ValueError:
        raise TierError(f"{file} is not JSON") from None
    if not isinstance(config, dict):
        raise TierError(f"{file} is not a model's configuration")
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(name)  # a multimodal model
        if isinstance(inner, dict):
            innermost = inner.get("text_config")
            config |= {**inner, **(innermost if isinstance(innermost, dict) else {})}
    try:
        return _shape(config, file, dtype or _quantized(config, file))
    except TierError as error:
        reason = str(error)
        raise TierError(reason if str(file) in reason else f"{file}: {reason}") from None


def _quantized(config: dict[str, Any], file: Path) -> str | None:
    """Return the type of a quantized KV cache, or None for the model's own type. The weights alone
    may be quantized. Raises TierError for an unknown type.
    """
    found: dict[str, Any] = {}
    beside = file.with_name("hf_quant_config.json")  # written by NVIDIA's ModelOpt
    if file.name == "config.json" and beside.is_file():
        try:
            own = json.loads(decode_text(beside.read_bytes()))
            found.update(own.get("quantization") or {})
        except (OSError, ValueError, AttributeError) as error:
            raise TierError(f"{beside} cannot be read ({error}); fix it or give --dtype") from None
    for name in ("quantization_config", "compression_config"):
        if isinstance(config.get(name), dict):
            found.update(config[name])
    for name, value in found.items():
        if "kv_cache" not in name or not value or value == "auto":
            continue
        kind = _kv_type(value)
        if kind is None:
            raise TierError(f"{name} is {value!r:.60}, which is not a supported type; give --dtype")
        return kind
    return None


def _kv_type(scheme: object) -> str | None:
    if isinstance(scheme, dict):
        bits, kind = scheme.get("num_bits"), scheme.get("type", "float")
        if bits == 8:
            return {"float": "FP8", "int": "U8"}.get(str(kind))
        return "BF16" if bits == 16 else None
    text = str(scheme).lower()
    if "fp8" in text or "float8" in text:
        return "FP8"
    return {"int8": "U8", "bf16": "BF16", "fp16": "F16"}.get(text)


def _shape(config: dict[str, Any], file: Path, dtype: str | None) -> KvShape:
    named = config.get("torch_dtype", config.get("dtype"))
    kind = dtype or _DTYPES.get(str(named).removeprefix("torch."))
    if kind is None:
        raise TierError(f"{file} names no supported element type; give --dtype")
    found = read_layers(config, _number(config, file, "num_hidden_layers", "n_layer", "num_layers"))
    layers, more = found.full, {}
    if found.full == 0 and found.window:  # every layer has the window, so blocks hold all of them
        layers = found.window
    elif found.full == 0:
        raise TierError(
            f"{file}: no layer keeps the KV of its tokens, so there is nothing to store; give "
            "another model"
        )
    else:
        more = {"window_layers": found.window}
    more |= {"window_tokens": found.window_tokens, "state_layers": found.state}
    rank = _number(config, file, "kv_lora_rank", default=0)
    if rank:
        rope = _number(config, file, "qk_rope_head_dim", default=0)
        return KvShape(layers, kind, latent_dim=rank + rope, **more)
    heads = _number(config, file, "num_attention_heads", "n_head")
    other = [name for name in config if _OF_KV_HEADS.search(name) and name not in _KV_HEADS]
    if other and config[other[0]]:
        raise TierError(
            f"{other[0]} means numbers of KV heads that beluga cannot size; give the numbers by "
            "options"
        )
    kv_heads = _number(config, file, *_KV_HEADS, default=heads)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    size = _number(config, file, "head_dim", "attention_head_dim", "kv_channels", default=0)
    if not size:
        size = _number(config, file, "hidden_size", "n_embd") // heads
    values = _number(config, file, "v_head_dim", default=size)
    if values != size:
        raise TierError(
            f"v_head_dim {values} differs from {size}, which is not supported; give the numbers by "
            "options"
        )
    return KvShape(layers, kind, kv_heads=kv_heads, head_dim=size, **more)


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
