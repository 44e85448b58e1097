# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What each layer of a model keeps, from its config.json: the KV of every token or of a window, a
state, or nothing.

Model families use different fields for their layers. A model with a field that changes the KV cache
in an unsupported way is rejected with that field's name, because a wrong size is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from beluga.errors import TierError

_FULL, _WINDOW, _STATE, _NOTHING = "full", "window", "state", "nothing"
_KINDS = {
    "full_attention": _FULL,
    "attention": _FULL,
    "global_attention": _FULL,
    "global": _FULL,
    "hybrid": _FULL,  # zamba2: attention and a state
    "sliding_attention": _WINDOW,
    "sliding_window_attention": _WINDOW,
    "local_attention": _WINDOW,
    "local": _WINDOW,
    "chunked_attention": _WINDOW,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "conv": _STATE,
    "recurrent": _STATE,
    "mlp": _NOTHING,
    "moe": _NOTHING,
}
_MINIMAX = {"0", "1"}
_NEMOTRON = {"*": _FULL, "M": _STATE, "-": _NOTHING, "E": _NOTHING}
# Fields of models whose KV is not supported, and their meaning.
_UNKNOWN = {
    "is_encoder_decoder": "a decoder with cross-attention",
    "cross_attention_layers": "layers that attend to images",
    "block_configs": "layers of different shapes",
    "index_head_dim": "an indexer with a cache of its own",
    "global_head_dim": "heads of two sizes",
    "num_global_key_value_heads": "two numbers of KV heads",
    "swa_num_key_value_heads": "two numbers of KV heads",
    "swa_head_dim": "heads of two sizes",
    "attention_k_eq_v": "keys that are the values",
    "compress_ratios": "KV that is compressed along the tokens",
    "use_cla": "layers that share KV",
    "cla_share_factor": "layers that share KV",
}
_STATEFUL = ("mamba", "rwkv", "ssm", "xlstm", "recurrent")  # in names of fields, or of the model


@dataclass(frozen=True, slots=True)
class Layers:
    """The number of layers of each kind. ``window`` is in tokens."""

    full: int
    window: int = 0
    window_tokens: int = 0
    state: int = 0


def read_layers(config: Mapping[str, Any], count: int) -> Layers:
    """Return what ``count`` layers keep. Raises TierError with the name of an unsupported field."""
    if str(config.get("model_type")).startswith("longcat") and not config.get("num_hidden_layers"):
        raise TierError(
            "num_layers of a longcat model counts pairs of layers; add num_hidden_layers, which is "
            "twice as much"
        )
    for name, what in _UNKNOWN.items():
        if config.get(name):
            raise TierError(
                f"{name} means {what}, which beluga cannot size; give the numbers by options"
            )
    kinds = _kinds(config, count)
    # Gemma3n: the last layers use the KV of others
    shared = config.get("num_kv_shared_layers") or 0
    if shared:
        kinds = kinds[: max(0, count - _whole("num_kv_shared_layers", shared))]
    window = kinds.count(_WINDOW)
    sizes = config.get("sliding_window") or config.get("attention_chunk_size")
    if window and not sizes:
        raise TierError(
            "layers have a window, but there is no sliding_window with its size; add it"
        )
    tokens = _whole("sliding_window", sizes) if window else 0
    state = count if config.get("model_type") == "falcon_h1" else kinds.count(_STATE)
    return Layers(kinds.count(_FULL), window, tokens, state)


def _kinds(config: Mapping[str, Any], count: int) -> list[str]:
    for name in ("layer_types", "layers_block_type", "block_types"):
        if config.get(name):
            return _listed(name, config[name], count)
    if pattern := config.get("hybrid_override_pattern"):
        return [_kind("hybrid_override_pattern", one, _NEMOTRON) for one in str(pattern)]
    if kinds := config.get("attn_type_list"):  # minimax: 0 is linear attention, 1 is full
        if (
            not isinstance(kinds, list)
            or len(kinds) != count
            or not {*map(repr, kinds)} <= _MINIMAX
        ):
            raise TierError(f"attn_type_list is not a list of 0 or 1 for each of {count} layers")
        return [_FULL if kind else _STATE for kind in kinds]
    full = _full_layers(config, count)
    if full is not None:
        return [_FULL if at in full else _STATE for at in range(count)]
    if stateful := _stateful(config):
        raise TierError(
            f"{stateful} means layers with a state, but no field lists them; give the numbers by "
            "options"
        )
    return _windows(config, count)


def _listed(name: str, value: object, count: int) -> list[str]:
    if not isinstance(value, list) or (len(value) not in (count, 1) and count % len(value)):
        raise TierError(f"{name} is not a list with one item for each of {count} layers; fix it")
    return [_kind(name, one, _KINDS) for one in value * (count // len(value))]


def _kind(name: str, value: object, kinds: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in kinds:
        raise TierError(
            f"{name} has {value!r:.40}, which is not a supported kind of layer; give the numbers "
            "by options"
        )
    return kinds[value]


def _full_layers(config: Mapping[str, Any], count: int) -> set[int] | None:
    """Return the layers with attention of a model whose other layers have a state."""
    for name in ("attn_layer_indices", "full_attn_idxs"):  # bamba; lfm2
        if isinstance(config.get(name), list):
            return {_whole(name, at) for at in config[name]}
    linear = config.get("linear_attn_config")  # Kimi's indices start at 1
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):
        return {_whole("full_attn_layers", at) - 1 for at in linear["full_attn_layers"]}
    if config.get("attn_layer_period"):  # jamba
        period = _whole("attn_layer_period", config["attn_layer_period"])
        offset = config.get("attn_layer_offset") or 0
        return {at for at in range(count) if at % period == offset}
    if config.get("full_attention_interval"):  # qwen3-next
        every = _whole("full_attention_interval", config["full_attention_interval"])
        return {at for at in range(count) if (at + 1) % every == 0}
    return None


def _stateful(config: Mapping[str, Any]) -> str | None:
    """Return a field that indicates layers with a state, if no field lists those layers."""
    model = str(config.get("model_type", ""))
    if model == "falcon_h1":  # each layer has both
        return None
    if any(part in model for part in _STATEFUL):
        return f"model_type {model}"
    return next(
        (key for key in config if any(part in key for part in _STATEFUL) and config[key]), None
    )


def _windows(config: Mapping[str, Any], count: int) -> list[str]:
    """Return the kinds of layers of a model in which all layers have attention."""
    if config.get("attention_chunk_size"):  # llama4: layers without positions attend to all tokens
        full = config.get("no_rope_layers")
        if isinstance(full, list) and full:
            return [_WINDOW if one else _FULL for one in full]
        every = _whole("no_rope_layer_interval", config.get("no_rope_layer_interval") or 4)
        return [_FULL if (at + 1) % every == 0 else _WINDOW for at in range(count)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [_FULL] * count
    model = config.get("model_type", "")
    usual = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}.get(str(model))
    pattern = config.get("sliding_window_pattern") or usual
    if pattern is not None:  # one in that many layers attends to all tokens
        every = _whole("sliding_window_pattern", pattern)
        return [_FULL if (at + 1) % every == 0 else _WINDOW for at in range(count)]
    if config.get("use_sliding_window"):  # qwen2
        first = _whole("max_window_layers", config.get("max_window_layers") or 0, least=0)
        return [_FULL if at < first else _WINDOW for at in range(count)]
    return [_WINDOW] * count  # mistral


def _whole(name: str, value: object, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TierError(f"{name} is {value!r:.40}, but must be a whole number of at least {least}")
    return value
