# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""KV of models whose layers differ, by the fields of their published config.json files; unsupported
models are rejected with the name of the field.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from beluga.errors import TierError
from beluga.tiers import KvShape, read_model

BASE = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
LAYER = 2 * 8 * 128 * 2  # bytes of a token


def shape(folder: Path, **fields: Any) -> KvShape:
    (folder / "config.json").write_text(json.dumps({**BASE, **fields}))
    return read_model(folder)


MIXED = ["sliding_attention", "full_attention"] * 16
# fields, layers of full attention, layers with a window, the window, layers with a state
LAYERS: dict[str, tuple[dict[str, Any], int, int, int, int]] = {
    "gpt-oss": ({"layer_types": MIXED, "sliding_window": 128}, 16, 16, 128, 0),
    "gemma3": ({"model_type": "gemma3_text", "sliding_window": 1024}, 5, 27, 1024, 0),
    "gemma3, its pattern": ({"sliding_window": 512, "sliding_window_pattern": 4}, 8, 24, 512, 0),
    "gemma2": ({"model_type": "gemma2", "sliding_window": 4096}, 16, 16, 4096, 0),
    "gemma3n": (
        {"layer_types": MIXED, "sliding_window": 512, "num_kv_shared_layers": 10}, 11, 11, 512, 0
    ),
    "mistral": ({"model_type": "mistral", "sliding_window": 4096}, 32, 0, 4096, 0),
    "mistral without": ({"model_type": "mistral", "sliding_window": None}, 32, 0, 0, 0),
    "qwen2": (
        {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28},
        32, 0, 0, 0,
    ),
    "qwen2, used": (
        {"sliding_window": 32768, "use_sliding_window": True, "max_window_layers": 28},
        28, 4, 32768, 0,
    ),
    "llama4": ({"attention_chunk_size": 8192}, 8, 24, 8192, 0),
    "llama4, listed": (
        {"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 8}, 8, 24, 8192, 0
    ),
    "chunked": (
        {"layer_types": ["chunked_attention", "full_attention"] * 16, "attention_chunk_size": 64},
        16, 16, 64, 0,
    ),
    "granite": ({"layers_block_type": ["mamba"] * 28 + ["attention"] * 4}, 4, 0, 0, 28),
    "jamba": ({"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16}, 4, 0, 0, 28),
    "bamba": ({"attn_layer_indices": [9, 18, 27], "mamba_d_state": 128}, 3, 0, 0, 29),
    "lfm2": ({"full_attn_idxs": [2, 5, 8]}, 3, 0, 0, 29),
    "lfm2, listed": ({"layer_types": ["conv", "full_attention"] * 16}, 16, 0, 0, 16),
    "qwen3-next": ({"full_attention_interval": 4}, 8, 0, 0, 24),
    "nemotron-h": ({"hybrid_override_pattern": "M-M*" * 8, "ssm_state_size": 128}, 8, 0, 0, 16),
    "kimi": ({"linear_attn_config": {"full_attn_layers": [4, 8]}}, 2, 0, 0, 30),
    "minimax": ({"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 4}, 4, 0, 0, 28),
    "falcon-h1": ({"model_type": "falcon_h1", "mamba_d_ssm": 3072}, 32, 0, 0, 32),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_window_and_state_layers_do_not_grow(tmp_path: Path, name: str) -> None:
    fields, full, window, tokens, state = LAYERS[name]
    found = shape(tmp_path, **fields)
    assert (found.layers, found.window_layers, found.state_layers) == (full, window, state)
    assert found.bytes_per_token == full * LAYER
    assert found.window_tokens == tokens
    assert found.window_bytes == window * tokens * LAYER
    for count, word in ((window, "keep the last"), (state, "state of fixed size")):
        assert (word in found.beside) == (count > 0)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"layer_types": ["full_attention", "retention"] * 16}, "layer_types has 'retention'"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types is not a list with one item"),
        ({"layer_types": MIXED}, "no sliding_window with its size"),
        ({"layers_block_type": [3] * 32}, "layers_block_type has 3"),
        ({"hybrid_override_pattern": "M*X"}, "hybrid_override_pattern has 'X'"),
        ({"model_type": "mamba2", "state_size": 128}, "model_type mamba2"),
        ({"model_type": "rwkv6"}, "model_type rwkv6"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"layer_types": ["linear_attention"] * 32}, "no layer keeps the KV"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"cross_attention_layers": [3, 8]}, "cross_attention_layers"),
        ({"index_head_dim": 128, "kv_lora_rank": 512}, "index_head_dim"),
        ({"block_configs": [{}]}, "block_configs"),
        ({"v_head_dim": 64}, "v_head_dim 64"),
        ({"sliding_window": "4096"}, "sliding_window is '4096'"),
        ({"attn_layer_period": 0.5}, "attn_layer_period is 0.5"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}}, "kv_cache_scheme"),
        ({"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, "kv_cache_quant_algo"),
        ({"num_key_value_heads": [8] * 32}, "num_key_value_heads"),
        ({"num_key_value_heads_per_layer": [4] * 32}, "num_key_value_heads_per_layer"),  # DeciLM
        ({"num_key_value_heads": None, "kv_n_heads": 4}, "kv_n_heads"),
        ({"use_cla": True, "cla_share_factor": 2}, "use_cla"),  # Hunyuan
        ({"attn_type_list": [0, 1]}, "attn_type_list is not a list"),
        ({"attn_type_list": [0, 2] * 16}, "attn_type_list is not a list"),
        ({"attn_type_list": [False, True] * 16}, "attn_type_list is not a list"),
        ({"attn_type_list": "01"}, "attn_type_list is not a list"),
        (
            {"model_type": "longcat_flash", "num_hidden_layers": None, "num_layers": 28},
            "num_layers of a longcat model",
        ),
    ],
    ids=str,
)
def test_unsupported_fields_are_rejected_by_name(
    tmp_path: Path, fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(TierError) as caught:
        shape(tmp_path, **fields)
    assert what in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "FP8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "U8"),
        ({"kv_cache_quant_algo": "FP8"}, "FP8"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "BF16"),  # only the weights
        ({"quant_method": "awq", "bits": 4}, "BF16"),
        ({"kv_cache_scheme": None}, "BF16"),
        ({"kv_cache_group": [], "kv_cache_post_rope": False, "kv_cache_quant_config": {}}, "BF16"),
    ],
    ids=str,
)
def test_a_quantized_cache_is_not_quantized_weights(
    tmp_path: Path, quantization: dict[str, Any], dtype: str
) -> None:
    assert shape(tmp_path, quantization_config=quantization).dtype == dtype
    (tmp_path / "config.json").write_text(json.dumps({**BASE}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert read_model(tmp_path).dtype == dtype
    assert read_model(tmp_path, "F16").dtype == "F16"


def test_a_multimodal_model_uses_its_text_config(tmp_path: Path) -> None:
    text = {**BASE, "layer_types": MIXED, "sliding_window": 1024}
    for outer in (
        {"text_config": text},
        {"llm_config": text},
        {"thinker_config": {"text_config": text}},
    ):
        (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **outer}))
        assert read_model(tmp_path).layers == 16


def test_falcon_has_a_different_field_for_kv_heads(tmp_path: Path) -> None:
    found = shape(tmp_path, num_key_value_heads=None, n_head_kv=4)
    assert found.kv_heads == 4


def test_mla_keeps_one_vector_in_growing_layers(tmp_path: Path) -> None:
    found = shape(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128)
    assert found.bytes_per_token == 32 * 576 * 2
