# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Updates the weights of a real vLLM, and prints the tokens that the pool provides before and
after.

Run it in .venv-vllm: updates_role.py POOL MODEL OTHER. OTHER is a model of the same shape with
other weights. It prints the cached tokens of the same prompt, as one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
BLOCK, TOKENS = 128, 3 * 128 + 1


def other_weights(model: Path, other: Path) -> None:
    """Make a model whose weights differ in one layer."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, other)
    (file,) = other.glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in sorted(weights) if name.endswith("k_proj.weight"))
    weights[name] = weights[name] + 0.5
    save_file(weights, file, metadata={"format": "pt"})


def main() -> None:
    """Print what was found."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pool, model, other = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    other_weights(model, other)

    from beluga_bench.vllm.engine import _override_kernels
    from vllm import LLM, SamplingParams

    from beluga.connectors.vllm import figures

    _override_kernels()
    llm = LLM(
        model=str(model),
        dtype="float32",
        block_size=BLOCK,
        enforce_eager=True,
        prefix_caching_hash_algo="sha256_cbor",
        max_model_len=TOKENS + BLOCK,
        kv_cache_memory_bytes=64 << 20,
        kv_transfer_config={
            "kv_connector": "BelugaConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"pool": pool, "timeout_ms": 5000},
        },
    )
    prompt = {"prompt_token_ids": [7 + i % 900 for i in range(TOKENS)]}
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)

    def tokens(*, reset: bool = True) -> tuple[list[int], int]:
        """Compute the prompt. Returns the answer and the tokens that the pool provided."""
        if reset:
            for _ in range(1000):
                if llm.reset_prefix_cache():
                    break
                time.sleep(0.01)
        before = figures()["hit_tokens"]
        (result,) = llm.generate([prompt], sampling, use_tqdm=False)
        hits = int(figures()["hit_tokens"] - before)
        settle()
        return list(result.outputs[0].token_ids), hits

    def settle() -> None:
        """Wait until all computed blocks are saved."""
        deadline, before = time.monotonic() + 60, -1.0
        while time.monotonic() < deadline:
            llm.llm_engine.step()
            now = sum(figures()[name] for name in ("save_blocks", "save_present_blocks"))
            if now == before:
                return
            before = now
            time.sleep(0.3)

    results: dict[str, Any] = {}
    deadline = time.monotonic() + 60
    while figures()["identity_bytes"] == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    old, _ = tokens()
    results["before"] = tokens()[1]
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    results["on old KV of its own"] = tokens(reset=False)[1]
    new, results["after the update"] = tokens()
    results["again"] = tokens()[1]
    results["differs"] = old != new
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
    back, results["back"] = tokens()
    results["back is the same"] = back == old
    print(json.dumps(results), file=answers, flush=True)


if __name__ == "__main__":
    main()
