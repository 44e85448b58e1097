# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Makes models with random weights, without downloads: hybrids of each combination of groups, and
others.

Run it in .venv-vllm: hybrid_models.py FOLDER NAME...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.05,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    # two groups with a window, one of full attention
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 6,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 256,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    # a group with a window of one block, and one of full attention
    "gpt_oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": 256,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # three groups of short convolutions
    "lfm2": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "block_ff_dim": 512,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 256,
        "conv_dim_out": 256,
        "block_dim": 256,
        "block_norm_eps": 1e-5,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    # three groups of Mamba 2
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "intermediate_size": 256,
        "shared_intermediate_size": 512,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
    },
    # three groups of gated delta networks
    "qwen3_next": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_only_layers": [0, 1, 2],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    # not a hybrid: latent attention, which is the same on all ranks
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 128,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
}


def make(folder: Path, name: str) -> None:
    """Save a model in ``folder``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = BASE | MODELS[name]
    folder.mkdir(parents=True)
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.to(torch.bfloat16).save_pretrained(folder)
    saved = json.loads(file.read_text())  # transformers omits a field that vLLM requires
    file.write_text(json.dumps(saved | {"architectures": fields["architectures"]}))


def make_adapters(model: Path) -> None:
    """Save two LoRA adapters of a model's keys, in folders beside its own."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    width, rank = config["num_key_value_heads"] * config["head_dim"], 8
    for number in (1, 2):
        torch.manual_seed(number)
        weights = {}
        for layer in range(config["num_hidden_layers"]):
            name = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, config["hidden_size"])
            weights[f"{name}.lora_B.weight"] = torch.randn(width, rank)
        made = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["k_proj"]}
        folder = model.with_name(f"{model.name}-adapter-{number}")
        folder.mkdir()
        save_file(weights, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({**made, "bias": "none"}))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        make(Path(sys.argv[1]) / name, name)
        if name == "gemma3":
            make_adapters(Path(sys.argv[1]) / name)
