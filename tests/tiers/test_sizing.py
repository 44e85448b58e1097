# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a lower tier admits, when a fetch pays, and the KV of a model: bytes per token, what a pool
and a disk hold, and what is refused by its field.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from support.blocks import keys, put

from beluga import Client, IndexServer, Pool
from beluga.cli.app import app
from beluga.errors import BelugaError, TierError
from beluga.index import IndexClient
from beluga.tiers import BLOCK, KvShape, TierSize, advise, read_model
from beluga.tiers.admission import ADMISSIONS, Adaptive, Always, SecondTouch, Sketch
from beluga.tiers.disk import DiskTier
from beluga.tiers.sizing import AlwaysFetch, BreakEven, MeasuredBandwidth


def mixed_keys(first: int, count: int) -> NDArray[np.uint64]:
    """Return well-mixed keys of these numbers; equal numbers have equal keys."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return np.stack([mixed, mixed * np.uint64(0x94D049BB133111EB)], axis=1)


def test_always_admits_every_block() -> None:
    assert Always().admit(mixed_keys(0, 5)).tolist() == [True] * 5


@pytest.mark.parametrize("policy", [SecondTouch(1 << 16), Sketch(1 << 16)], ids=["table", "sketch"])
def test_a_key_is_admitted_at_its_second_touch(policy: SecondTouch | Sketch) -> None:
    assert np.count_nonzero(policy.admit(mixed_keys(0, 1000))) == 0
    assert policy.admit(mixed_keys(500, 1000)).tolist() == [True] * 500 + [False] * 500


def test_the_table_drops_displaced_keys_and_no_others() -> None:
    policy = SecondTouch(1 << 10)
    policy.admit(mixed_keys(0, 500))
    policy.admit(mixed_keys(10_000, 100_000))
    assert np.count_nonzero(policy.admit(mixed_keys(0, 500))) == 0


def test_the_table_does_not_confuse_keys() -> None:
    policy = SecondTouch(1)
    assert not any(policy.admit(mixed_keys(n, 1))[0] for n in range(1000))


def test_the_sketch_ages() -> None:
    policy = Sketch(1 << 12)
    policy.admit(mixed_keys(0, 10))
    policy.admit(mixed_keys(0, 10))
    for first in range(10_000, 10_000 + (1 << 16), 1 << 12):
        policy.admit(mixed_keys(first, 1 << 12))
    admitted = policy.admit(mixed_keys(1_000_000, 1000))
    assert np.count_nonzero(admitted) < 900  # the counts are bounded
    assert Sketch(1 << 12, count_min=3).admit(mixed_keys(0, 4)).tolist() == [False] * 4


@pytest.mark.parametrize("trial", [0, 1000])
def test_without_reuse_adaptive_admits_no_more_than_its_trial(trial: int) -> None:
    policy = Adaptive(1 << 16, trial=trial, pool_hits=lambda: 0)
    admitted = [policy.admit(mixed_keys(first, 100)) for first in range(0, 1 << 17, 100)]
    assert np.count_nonzero(admitted) == trial


def test_hits_in_the_pool_enable_adaptive_before_any_eviction() -> None:
    hits = 0
    policy = Adaptive(1 << 16, trial=0, warm_up=10_000, pool_hits=lambda: hits)
    assert not policy.admit(mixed_keys(0, 100)).any()
    hits = 50
    assert policy.admit(mixed_keys(100, 100)).all()


def test_a_prompt_shared_by_all_does_not_keep_adaptive_enabled() -> None:
    """After the warm-up, hits in the pool do not predict those of a lower tier."""
    hits = 0
    policy = Adaptive(1 << 20, warm_up=10_000, pool_hits=lambda: hits)
    late = 0
    for number in range(1000):
        hits += 32
        admitted = policy.admit(mixed_keys(number * 100, 100))
        late += int(np.count_nonzero(admitted)) if number >= 900 else 0
    assert late == 0


@pytest.mark.parametrize("source", ["a lower tier", "commits"])
def test_reuse_keeps_adaptive_enabled(source: str) -> None:
    policy, total = Adaptive(1 << 20), 0
    for number in range(500):
        batch = mixed_keys(number * 100, 100)
        if source == "a lower tier":
            policy.hit(10)
        elif number >= 10:
            batch[:10] = mixed_keys((number - 10) * 100 + 50, 10)
        total += int(np.count_nonzero(policy.admit(batch)))
    assert total > 0.95 * 50_000


def test_adaptive_below_break_even_still_admits_repeated_blocks() -> None:
    policy = Adaptive(1 << 20, break_even=0.5, trial=0)
    policy.admit(mixed_keys(0, 100))
    assert policy.admit(mixed_keys(90, 100)).tolist() == [True] * 10 + [False] * 90


@pytest.mark.parametrize("name", ADMISSIONS)
def test_an_empty_batch_has_no_effect(name: str) -> None:
    policy = ADMISSIONS[name]()
    assert policy.admit(np.zeros((0, 2), np.uint64)).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SecondTouch(0), "can remember 1 to"),
        (lambda: Adaptive(break_even=0.0), "between 0 and 1"),
        *((lambda x=x: BreakEven(x, 0.0), "finite") for x in (-1.0, math.inf, math.nan)),
        *((lambda x=x: MeasuredBandwidth(x), "greater than 0") for x in (-1.0, math.inf, math.nan)),
    ],
)
def test_an_invalid_policy_is_rejected(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TierError, match=message):
        call()


def attention(hidden: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def gpt(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads, **more}


BF16 = {"torch_dtype": "bfloat16"}


# The relevant fields of the published config.json files, and the bytes per token that their authors
# or vLLM's log state.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-32B": (attention(5120, 64, 64, 8, head_dim=128, **BF16), 262_144),
    "Llama-3.1-8B": (attention(4096, 32, 32, 8, dtype="torch.bfloat16"), 131_072),
    "DeepSeek-V3": (
        attention(7168, 61, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64, **BF16),
        70_272,
    ),
    "GPT-2": (gpt(768, 12, 12, torch_dtype="float32"), 36_864),
    "multi-query": (gpt(6144, 40, 48, multi_query=True, torch_dtype="float16"), 2 * 40 * 128 * 2),
    "text and images": (
        {**BF16, "text_config": attention(2560, 34, 8, 4, head_dim=256)},
        2 * 34 * 4 * 256 * 2,
    ),
    "linear attention in three of four layers": (
        {
            **attention(2048, 8, 16, 2, head_dim=256, **BF16),
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        },
        2 * 2 * 2 * 256 * 2,
    ),
}

BASE = attention(4096, 32, 32, 8, head_dim=128, **BF16)
LAYER = 2 * 8 * 128 * 2  # bytes of a token

TOKEN = 256 << 10
QWEN = BreakEven(0.07663, 1.521e-6)


def written(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_a_token_follow_from_the_configuration(name: str, tmp_path: Path) -> None:
    config, expected = MODELS[name]
    folder = written(tmp_path, config)
    assert read_model(folder).bytes_per_token == expected
    assert read_model(folder / "config.json") == read_model(folder)


def test_the_cache_type_can_differ_from_the_models(tmp_path: Path) -> None:
    folder = written(tmp_path, MODELS["Qwen3-32B"][0])
    assert read_model(folder, "FP8").bytes_per_token == 131_072
    with pytest.raises(TierError, match="names no supported element type; give --dtype"):
        read_model(written(tmp_path, gpt(768, 12, 12)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "is not a model's configuration"),
        ({"torch_dtype": "float16"}, "has no num_hidden_layers or n_layer"),
        ({"torch_dtype": "float16", "n_layer": 2}, "has no num_attention_heads or n_head"),
        ({"torch_dtype": "float16", "n_layer": "2"}, "has n_layer = '2', which is not a number"),
        ({"torch_dtype": "float16", "n_layer": 0, "n_head": 1, "head_dim": 8}, "has no num_hidden"),
        ({"torch_dtype": "float16", "n_layer": 2, "n_head": 8, "n_embd": 4}, "KV heads with a"),
    ],
)
def test_incomplete_configurations_are_rejected(
    config: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(TierError, match=message):
        read_model(written(tmp_path, config))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"cannot read .*config.json: No such file"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff{")
    with pytest.raises(TierError, match="is not JSON"):
        read_model(tmp_path)


@pytest.mark.parametrize("tokens", [1, 12, 50])
def test_a_pool_that_is_made_as_advised_holds_as_many_blocks_as_advised(
    tokens: int, shm: Path
) -> None:
    """All of them are still stored, and few more would fit."""
    shape, size = KvShape(3, "F16", kv_heads=4, head_dim=256), 64 << 20
    advice = advise(shape, [TierSize("memory", size)], block_tokens=tokens)
    (tier,) = advice.tiers
    assert tier.max_blocks is not None
    with (
        Pool.create([shm / "a"], device_size=size, max_blocks=tier.max_blocks, sparse=True) as pool,
        IndexServer(pool),
        Client(pool) as session,
    ):
        client = IndexClient(session)
        sizes = {"length": advice.block_bytes, "chunk_size": 16 << 10}
        put(client, range(tier.blocks), **sizes)
        assert client.stat().evict_count == 0
        put(client, range(tier.blocks, tier.blocks + tier.blocks // 20 + 8), **sizes)
        assert client.stat().evict_count > 0


def test_a_disk_holds_as_many_blocks_as_advised(tmp_path: Path) -> None:
    shape, size = KvShape(3, "F16", kv_heads=4, head_dim=256), 24 << 20
    advice = advise(shape, [TierSize("disk", size)], block_tokens=12)
    count, length = advice.tiers[0].blocks, advice.block_bytes
    disk = DiskTier(tmp_path / "disk", size, smallest_block=min(length, 16 << 10))
    try:
        records = np.zeros(count, BLOCK)
        records["key"], records["length"] = keys(range(count)), length
        payload = np.zeros((count, length), np.uint8)
        for start in range(0, count, 16):
            assert disk.save(records[start : start + 16], payload[start : start + 16]).all()
        assert disk.contains(keys(range(count))).mean() > 0.97
    finally:
        disk.close()


def test_onboarding_pays_above_the_bandwidth_of_break_even() -> None:
    """The reference's example: Qwen3-32B on an H200."""
    shape = KvShape(64, "BF16", kv_heads=8, head_dim=128)
    tiers = [
        TierSize("memory", 64 << 30, 26e9),
        TierSize("disk", 1 << 40, 5e9),
        TierSize("disk", 1 << 40, 3e9),
        TierSize("disk", 1 << 40),
    ]
    advice = advise(shape, tiers, recompute_ms_per_token=0.077)
    assert advice.break_even_bytes_per_s == pytest.approx(3.4e9, rel=0.01)
    *per_token, unknown = [tier.onboard_ms_per_token for tier in advice.tiers]
    assert per_token == pytest.approx([0.010, 0.052, 0.087], abs=5e-4) and unknown is None
    assert [tier.pays for tier in advice.tiers] == [True, True, False, None]


@pytest.mark.parametrize(
    ("tier", "tokens", "message"),
    [
        (TierSize("memory", 8 << 20), 4096, "memory of 8 MiB holds no block of"),
        (TierSize("disk", 8 << 20), 4096, "disk of 8 MiB holds no block of"),
        (TierSize("disk", 1 << 20), 1, "give it at least 4 MiB"),
        (TierSize("disk", 8 << 20), 0, "block_tokens is 0"),
        (TierSize("memory", 1 << 20), 1, "--memory 1 MiB is out of range for a pool; give"),
        (TierSize("memory", 0), 1, "--memory 0 bytes is out of range for a pool"),
    ],
)
def test_tiers_without_capacity_are_rejected(tier: TierSize, tokens: int, message: str) -> None:
    with pytest.raises(BelugaError, match=message):
        advise(KvShape(8, "U8", kv_heads=8, head_dim=128), [tier], block_tokens=tokens)


def beluga(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["size", *map(str, arguments)])


NUMBERS = ("--layers", 64, "--kv-heads", 8, "--head-dim", 128)


def test_the_command_shows_the_advice_and_prints_it_as_json(tmp_path: Path) -> None:
    folder = written(tmp_path, MODELS["Qwen3-32B"][0])
    costs = ("--model-costs", "qwen3-32b-h200", "--disk-bandwidth", 3)
    sizes = ("--memory", "4G", "--disk", "64G", *costs)
    shown = beluga(folder, *sizes)
    assert shown.exit_code == 0, shown.output
    for text in ("256 KiB", "16 tokens, 4 MiB", "3.42 GB/s", "yes", "no"):
        assert text in shown.stdout
    advice, by_numbers = (
        json.loads(beluga(*model, *sizes, "--json").stdout) for model in ((folder,), NUMBERS)
    )
    assert advice == by_numbers
    assert advice["bytes_per_token"] == 262_144
    assert [tier["name"] for tier in advice["tiers"]] == ["memory", "disk"]
    assert advice["tiers"][0]["tokens"] == 16 * advice["tiers"][0]["blocks"]
    later = json.loads(beluga(folder, *sizes, "--position", 30_000, "--json").stdout)
    assert later["break_even_bytes_per_s"] < advice["break_even_bytes_per_s"]


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
    "ling 2.5": ({"layer_group_size": 8, "num_nextn_predict_layers": 1}, 4, 0, 0, 28),
    "step 3.5": (
        {"layer_types": [*MIXED, *MIXED[:3]], "sliding_window": 64, "num_nextn_predict_layers": 3},
        16, 16, 64, 0,
    ),
    "nemotron, no number of layers": (
        {"num_hidden_layers": None, "layers_block_type": ["mamba", "moe", "attention", "moe"] * 2},
        2, 0, 0, 2,
    ),
    "griffin, a pattern that is cut": (
        {"block_types": ["recurrent", "recurrent", "attention"], "num_hidden_layers": 26},
        8, 0, 0, 18,
    ),
    "afmoe": (
        {"layer_types": MIXED, "sliding_window": 64, "global_attn_every_n_layers": 2}, 16, 16, 64, 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_window_and_state_layers_do_not_grow(tmp_path: Path, name: str) -> None:
    fields, full, window, tokens, state = LAYERS[name]
    kv = shape(tmp_path, **fields)
    assert (kv.layers, kv.window_layers, kv.state_layers) == (full, window, state)
    assert kv.bytes_per_token == full * LAYER
    assert kv.window_tokens == tokens
    assert kv.window_bytes == window * tokens * LAYER
    for count, word in ((window, "keep the last"), (state, "state of fixed size")):
        assert (word in kv.fixed_kv) == (count > 0)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"layer_types": ["full_attention", "retention"] * 16}, "layer_types has 'retention'"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types is not a list with one item"),
        ({"layer_types": MIXED}, "no sliding_window with its size"),
        ({"layers_block_type": [3] * 32}, "layers_block_type has 3"),
        ({"hybrid_override_pattern": "M*X-" * 8}, "hybrid_override_pattern has 'X'"),
        ({"hybrid_override_pattern": "M*"}, "hybrid_override_pattern does not have one letter"),
        ({"kv_lora_rank": 512}, "has no qk_rope_head_dim"),
        ({"num_key_value_heads": None, "gqa_ratio": 8}, "gqa_ratio is 8"),
        ({"num_key_value_heads": 64}, "cannot share 64 KV heads"),
        ({"is_causal": False}, "is_causal is false"),
        ({"model_type": "siglip", "text_config": BASE}, "siglip, an encoder"),
        ({"model_type": "vit"}, "vit, an encoder"),
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
        ({"model_type": "bert", "is_decoder": False}, "bert, an encoder"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "an encoder"),
        ({"layer_group_size": 5}, "layer_group_size is 5"),
        ({"layer_groups": 4}, "layer_groups is 4"),
        ({"num_attention_groups_local": 2}, "num_attention_groups_local is 2"),
        ({"n_recurrent_layers": 40}, "n_recurrent_layers means"),
        ({"kv_source_layers": [0, 1]}, "kv_source_layers is [0, 1]"),
        ({"indexer_cache_dim": 64}, "indexer_cache_dim is 64"),
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


CHATGLM = {"num_key_value_heads": None, "multi_query_group_num": 2}


@pytest.mark.parametrize(
    ("fields", "of_token"),
    [
        # The names of the number of KV heads, of 8 in BASE
        ({"num_key_value_heads": None, "num_query_groups": 4}, 32 * LAYER // 2),
        ({"num_key_value_heads": None, "num_attention_groups": 4}, 32 * LAYER // 2),
        ({"num_key_value_heads": None, "n_head_kv": 4}, 32 * LAYER // 2),
        # The number counts only if heads share them: ChatGLM
        ({**CHATGLM, "multi_query_attention": True}, 32 * LAYER // 4),
        ({**CHATGLM, "multi_query_attention": False}, 32 * LAYER * 4),
        # A null hides no value
        ({"torch_dtype": None, "dtype": "bfloat16", "text_config": {"dtype": None}}, 32 * LAYER),
        # MLA keeps one vector in growing layers
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}, 32 * 576 * 2),
    ],
    ids=str,
)
def test_a_field_may_have_several_names(
    tmp_path: Path, fields: dict[str, Any], of_token: int
) -> None:
    assert shape(tmp_path, **fields).bytes_per_token == of_token


@pytest.mark.parametrize(
    ("bandwidth", "latency_s", "cached", "tokens", "pays"),
    [
        (26e9, 0.0, 0, 16, True),
        (5e9, 0.0, 0, 16, True),
        (3.5e9, 0.0, 0, 16, True),
        (3.3e9, 0.0, 0, 16, False),
        (2e9, 0.0, 36_000, 16, True),
        (26e9, 0.0005, 0, 16, True),  # the latency counts once
        (26e9, 0.0012, 0, 16, False),
        (26e9, 0.0012, 0, 1024, True),
        (0.0, 0.0, 0, 16, False),
    ],
)
def test_the_break_even_matches_the_reference(
    bandwidth: float, latency_s: float, cached: int, tokens: int, pays: bool
) -> None:
    """It lies near 3.4 GB/s for Qwen3-32B on an H200."""
    latency = [latency_s] if latency_s else []  # none by default
    assert QWEN.pays(cached, tokens, tokens * TOKEN, bandwidth, *latency) is pays
    assert AlwaysFetch().pays(cached, tokens, tokens * TOKEN, bandwidth)


def test_the_bandwidth_follows_the_loads() -> None:
    tier = MeasuredBandwidth(1e9)
    assert tier.bytes_per_s == 1e9
    tier.note(1 << 20, 0.001)
    assert tier.bytes_per_s == pytest.approx((1 << 20) / 0.001)
    for _ in range(100):
        tier.note(1 << 20, 0.1)
    assert tier.bytes_per_s == pytest.approx((1 << 20) / 0.1, rel=0.01)
    tier.note(0, 1.0)
    tier.note(1 << 20, 0.0)
    assert tier.bytes_per_s == pytest.approx((1 << 20) / 0.1, rel=0.01)
