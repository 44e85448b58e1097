# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The KV cache size of a model: bytes per token, from its config.json or from given numbers.

Model families use different fields for their layers, which keep the KV of every token or of a
window, a state, or nothing. A model with a field that changes the KV cache in an unsupported way is
rejected with that field's name, because a wrong size is worse than none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beluga.arguments import StrPath, path_of
from beluga.errors import TierError
from beluga.text import decode_text
from beluga.transfer import DTYPE_SIZES

_DTYPES = {
    "float32": "F16",  # engines load such a checkpoint as float16
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8",
    "float8_e5m2": "FP8",
}
_CONFIG_MAX = 16 << 20  # bytes
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_HEAD_SIZES = ("head_dim", "attention_head_dim", "kv_channels")
_KV_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv"),
    *("num_query_groups", "num_attention_groups"),  # Megatron-core; Step
)
_MTP = "num_nextn_predict_layers"
_PATTERN = "hybrid_override_pattern"
_LISTS = ("layer_types", "layers_block_type", "block_types")
_PERIODS = ("full_attention_interval", "layer_group_size")  # qwen3-next; Ling 2.5
_INDICES = ("attn_layer_indices", "full_attn_idxs")  # bamba; lfm2

# A field may change the KV cache if its name has one of these words. It is read here, it is
# harmless, or the model is rejected.
_RELEVANT = re.compile(
    "layer|group|shar|index|attn|attention|window|sliding|latent|lora|kv|key_value|cache|head|"
    "encoder|cross|compress|chunk|block|recur|conv|ssm|mamba|linear|state|query|gqa|mqa"
)
_HARMLESS = re.compile(
    "norm|bias|drop|rope|expert|moe|mlp|topk_group|^n_group|fp32|kernel|token|ffn|softcap|scal|"
    "multiplier|init|logit|logn|_act|lm_head|quant|probs|temper|sink|gate|dense|intermediate|flash|"
    "implementation|factor|mtp|per_layer_input|classif|image|vision|video|audio|mm_|projector|"
    "select_layer|^_|^use_cache|^use_parallel|^compression_config|^q_lora|^qk_|^query_|^share_q_|"
    "^attn_scale|"
    # fixed states of layers that a list names; _stateful() rejects those that no list names
    "^linear_|mamba|^ssm_|^conv_|^use_conv|^chunk_size|^block_(multiple|auto|size)|"
    "^parallel_attn|^num_attention_heads_per_layer|^num_sliding_attention_heads|^num_mem_blocks|"
    "^attention_hidden_size"
)
# These are harmless, too, if one of _LISTS names the layers.
_ORDER = re.compile("every|interval|period|pattern|_ids|_indices")

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
    "is_encoder": "no cache",
    "global_head_dim": "heads of two sizes",
    "num_global_key_value_heads": "two numbers of KV heads",
    "swa_num_key_value_heads": "two numbers of KV heads",
    "swa_head_dim": "heads of two sizes",
    "attention_k_eq_v": "keys that are the values",
    "compress_ratios": "KV that is compressed along the tokens",
    "use_cla": "layers that share KV",
    "cla_share_factor": "layers that share KV",
}
_READ = {
    *(*_LAYERS, *_HEADS, *_HEAD_SIZES, *_KV_HEADS, _MTP, *_LISTS, *_PERIODS, *_INDICES, *_UNKNOWN),
    *("v_head_dim", "kv_lora_rank", "multi_query", "multi_query_attention"),
    *(
        "num_kv_shared_layers",
        "attn_type_list",
        "attn_layer_period",
        "attn_layer_offset",
        "linear_attn_config",
    ),
    *("attention_chunk_size", "no_rope_layers", "no_rope_layer_interval", "max_window_layers"),
    *("sliding_window", "use_sliding_window", "sliding_window_pattern", _PATTERN),
}
_ENCODERS = re.compile(  # of model types and architectures
    "bert|electra|mpnet|clip|siglip|wav2vec|dinov|^vit|^deit|^esm|^new$|ForMaskedLM|"
    "ForSequenceClassification|ForTokenClassification|ForQuestionAnswering|ForImageClassification"
)
_STATEFUL = ("mamba", "rwkv", "ssm", "xlstm", "recurrent")  # in names of fields, or of the model


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
    def fixed_kv(self) -> str:
        """A description of the KV that does not grow; empty if there is none."""
        limits = []
        if self.window_layers:
            limits.append(
                f"{self.window_layers} layers keep the last {self.window_tokens:,} tokens, at most "
                f"{self.window_bytes:,} bytes a sequence"
            )
        if self.state_layers:
            limits.append(
                f"{self.state_layers} layers have a state of fixed size, not counted here"
            )
        return "; ".join(limits)


def read_model(path: StrPath, dtype: str | None = None) -> KvShape:
    """Read a model's config.json, given the file or its folder.

    ``dtype`` overrides the type of the KV cache. Raises TierError.
    """
    path = path_of("path", path)
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            text = opened.read(_CONFIG_MAX)
        config = json.loads(decode_text(text))
    except OSError as error:
        raise TierError(f"cannot read {file}: {error.strerror}; name a folder or file") from None
    except ValueError:
        raise TierError(f"{file} is not JSON; name a model's config.json") from None
    if not isinstance(config, dict):
        raise TierError(f"{file} is not a model's configuration; name its config.json")
    own = config  # the fields of the model that keeps KV
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(name)  # a multimodal model
        if isinstance(inner, dict):
            innermost = inner.get("text_config")
            own = innermost if isinstance(innermost, dict) else inner
            fields = {**inner, **own}.items()
            config |= {key: value for key, value in fields if "dtype" not in key or value}
    try:
        _refuse_encoder(config)
        _refuse_encoder(own)
        shape = _shape(config, file, dtype or _quantized(config, file))
        _refuse_unknown(own)
        return shape
    except TierError as error:
        reason = str(error)
        raise TierError(reason if str(file) in reason else f"{file}: {reason}") from None


def _refuse_encoder(config: Mapping[str, Any]) -> None:
    kinds = [config.get("model_type"), *_list_of(config.get("architectures"))]
    encoder = next((kind for kind in map(str, kinds) if _ENCODERS.search(kind)), None)
    if encoder is not None and "decoder" not in encoder and not config.get("is_decoder"):
        raise TierError(
            f"model_type or architectures names {encoder}, an encoder, which keeps no KV; give "
            "another model"
        )
    if config.get("is_causal") is False:
        raise TierError("is_causal is false: an encoder keeps no KV; give another model")


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    listed = any(config.get(name) for name in _LISTS)
    for name, value in config.items():
        if not value or name in _READ or not _RELEVANT.search(name) or _HARMLESS.search(name):
            continue
        if listed and _ORDER.search(name):
            continue
        raise TierError(
            f"{name} is {value!r:.40}, which may change the KV cache, and which beluga does not "
            "read; give the numbers by options, or remove it if it does not"
        )


def _list_of(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _quantized(config: dict[str, Any], file: Path) -> str | None:
    """Return the type of a quantized KV cache, or None for the model's own type. The weights alone
    may be quantized. Raises TierError for an unknown type.
    """
    fields: dict[str, Any] = {}
    quantization = file.with_name("hf_quant_config.json")  # written by NVIDIA's ModelOpt
    if file.name == "config.json" and quantization.is_file():
        try:
            own = json.loads(decode_text(quantization.read_bytes()))
            fields.update(own.get("quantization") or {})
        except (OSError, ValueError, AttributeError) as error:
            raise TierError(
                f"{quantization} cannot be read ({error}); fix it or give --dtype"
            ) from None
    for name in ("quantization_config", "compression_config"):
        if isinstance(config.get(name), dict):
            fields.update(config[name])
    for name, value in fields.items():
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
    named = config.get("dtype") or config.get("torch_dtype")
    kind = dtype or _DTYPES.get(str(named).removeprefix("torch."))
    if kind is None:
        raise TierError(f"{file} names no supported element type; give --dtype")
    listed = next((len(_list_of(config.get(name))) for name in _LISTS if config.get(name)), None)
    counts = read_layers(config, _number(config, file, *_LAYERS, default=listed))
    layers, more = counts.full, {}
    if counts.full == 0 and counts.window:
        layers = counts.window  # every layer has the window, so blocks hold all of them
    elif counts.full == 0:
        raise TierError(
            f"{file}: no layer keeps the KV of its tokens, so there is nothing to store; give "
            "another model"
        )
    else:
        more = {"window_layers": counts.window}
    more |= {"window_tokens": counts.window_tokens, "state_layers": counts.state}
    rank = _number(config, file, "kv_lora_rank", default=0)
    if rank:
        rope = _number(config, file, "qk_rope_head_dim")
        return KvShape(layers, kind, latent_dim=rank + rope, **more)
    heads = _number(config, file, *_HEADS)
    kv_heads = _number(config, file, *_KV_HEADS, default=heads)
    if config.get("multi_query_attention") is False:  # ChatGLM
        kv_heads = heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    if heads % kv_heads:
        raise TierError(
            f"{heads} attention heads cannot share {kv_heads} KV heads; give the numbers by options"
        )
    size = _number(config, file, *_HEAD_SIZES, default=0)
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
    for name, meaning in _UNKNOWN.items():
        if config.get(name):
            raise TierError(
                f"{name} means {meaning}, which beluga cannot size; give the numbers by options"
            )
    kinds = _kinds_of_layers(config, count)
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


def _kinds_of_layers(config: Mapping[str, Any], count: int) -> list[str]:
    for name in _LISTS:
        if config.get(name):
            return _listed(name, config[name], count, config.get(_MTP))
    if pattern := config.get(_PATTERN):
        if len(str(pattern)) != count:
            raise TierError(f"{_PATTERN} does not have one letter for each of {count} layers")
        return [_kind_of_layer(_PATTERN, letter, _NEMOTRON) for letter in str(pattern)]
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


def _listed(name: str, value: object, count: int, predicting: object) -> list[str]:
    if isinstance(value, list) and isinstance(predicting, int) and len(value) == count + predicting:
        value = value[:count]  # the layers that predict further tokens follow (Step 3.5)
    if name == "block_types" and isinstance(value, list):  # Griffin: a pattern that repeats
        value = (value * count)[:count]
    if not isinstance(value, list) or (len(value) not in (count, 1) and count % len(value)):
        raise TierError(f"{name} is not a list with one item for each of {count} layers; fix it")
    return [_kind_of_layer(name, kind, _KINDS) for kind in value * (count // len(value))]


def _kind_of_layer(name: str, value: object, kinds: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in kinds:
        raise TierError(
            f"{name} has {value!r:.40}, which is not a supported kind of layer; give the numbers "
            "by options"
        )
    return kinds[value]


def _full_layers(config: Mapping[str, Any], count: int) -> set[int] | None:
    """Return the layers with attention of a model whose other layers have a state."""
    for name in _INDICES:
        if isinstance(config.get(name), list):
            return {_whole(name, at) for at in config[name]}
    linear = config.get("linear_attn_config")  # Kimi's indices start at 1
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):
        return {_whole("full_attn_layers", at) - 1 for at in linear["full_attn_layers"]}
    if config.get("attn_layer_period"):  # jamba
        period = _whole("attn_layer_period", config["attn_layer_period"])
        offset = config.get("attn_layer_offset") or 0
        return {at for at in range(count) if at % period == offset}
    for name in _PERIODS:
        if config.get(name):
            every = _whole(name, config[name])
            if name == "layer_group_size" and count % every:
                raise TierError(f"{name} is {every}, which does not divide {count} layers; fix it")
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
            return [_WINDOW if has_window else _FULL for has_window in full]
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
        first = _whole("max_window_layers", config.get("max_window_layers") or 0, minimum=0)
        return [_FULL if at < first else _WINDOW for at in range(count)]
    return [_WINDOW] * count  # mistral


def _whole(name: str, value: object, *, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise TierError(f"{name} is {value!r:.40}; give a whole number of at least {minimum}")
    return value
