# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Sizes of tiers: KV bytes by models' configurations, and capacities compared with those of real
tiers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.blocks import keys, put

from beluga import Client, IndexServer, Pool
from beluga.cli.app import app
from beluga.errors import BelugaError, TierError
from beluga.index import IndexClient
from beluga.tiers import BLOCK, KvShape, TierSize, advise, read_model
from beluga.tiers.disk import DiskTier

# The relevant fields of the published config.json files, and the bytes per token that their authors
# or vLLM's log state.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-32B": (
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "torch_dtype": "bfloat16",
        },
        262_144,
    ),
    "Llama-3.1-8B": (
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "dtype": "torch.bfloat16",
        },
        131_072,
    ),
    "DeepSeek-V3": (
        {
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "torch_dtype": "bfloat16",
        },
        70_272,
    ),
    "GPT-2": ({"n_embd": 768, "n_layer": 12, "n_head": 12, "torch_dtype": "float32"}, 73_728),
    "multi-query": (
        {
            "n_embd": 6144,
            "n_layer": 40,
            "n_head": 48,
            "multi_query": True,
            "torch_dtype": "float16",
        },
        2 * 40 * 128 * 2,
    ),
    "text and images": (
        {
            "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
            },
        },
        2 * 34 * 4 * 256 * 2,
    ),
    "linear attention in three of four layers": (
        {
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "torch_dtype": "bfloat16",
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        },
        2 * 2 * 2 * 256 * 2,
    ),
}


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
    del MODELS["GPT-2"][0]["torch_dtype"]
    with pytest.raises(TierError, match="names no supported element type; give --dtype"):
        read_model(written(tmp_path, MODELS["GPT-2"][0]))
    MODELS["GPT-2"][0]["torch_dtype"] = "float32"


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
        more = tier.blocks // 20 + 8
        put(client, range(tier.blocks), length=advice.block_bytes, chunk_size=16 << 10)
        assert client.stat().evict_count == 0
        put(
            client,
            range(tier.blocks, tier.blocks + more),
            length=advice.block_bytes,
            chunk_size=16 << 10,
        )
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
    per_token = [tier.onboard_ms_per_token for tier in advice.tiers]
    assert per_token == [
        pytest.approx(0.010, abs=5e-4),
        pytest.approx(0.052, abs=5e-4),
        pytest.approx(0.087, abs=5e-4),
        None,
    ]
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
    found, by_numbers = (
        json.loads(beluga(*model, *sizes, "--json").stdout) for model in ((folder,), NUMBERS)
    )
    assert found == by_numbers
    assert found["bytes_per_token"] == 262_144
    assert [tier["name"] for tier in found["tiers"]] == ["memory", "disk"]
    assert found["tiers"][0]["tokens"] == 16 * found["tiers"][0]["blocks"]
    later = json.loads(beluga(folder, *sizes, "--position", 30_000, "--json").stdout)
    assert later["break_even_bytes_per_s"] < found["break_even_bytes_per_s"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--kv-heads", 8, "--memory", "4G"), 2, "need --layers"),
        (("--trace", "/nowhere"), 1, "/nowhere: No such file or directory; name a trace"),
        (("x", "--layers", 2), 2, "give a model or its numbers"),
        ((*NUMBERS, "--memory", "1x"), 2, "1x"),
        ((*NUMBERS, "--recompute-ms", 1, "--model-costs", "x"), 2, "exclude each other"),
        ((*NUMBERS, "--memory", "4G", "--model-costs", "x"), 2, "there are no --model-costs 'x'"),
        ((*NUMBERS, "--memory", "4G", "--disk-bandwidth", "inf"), 2, "--disk-bandwidth"),
        ((*NUMBERS, "--memory", "4G", "--recompute-ms", "inf"), 2, "--recompute-ms"),
        ((*NUMBERS, "--memory", "4G", "--position", 10**29), 2, "--position"),
        (("--layers", 4, "--memory", "4G"), 2, "needs layers, and KV heads"),
        (
            (*NUMBERS, "--dtype", "F8", "--memory", "4G"),
            2,
            "there is no element type F8; give one of F32",
        ),
    ],
)
def test_wrong_command_lines_get_one_clear_line(
    arguments: tuple[object, ...], status: int, message: str
) -> None:
    found = beluga(*arguments)
    text = found.output + str(found.exception)
    assert (found.exit_code, message in " ".join(text.replace("│", " ").split())) == (status, True)
