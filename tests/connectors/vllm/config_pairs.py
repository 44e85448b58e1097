# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prints in which sections of a real vLLM's configuration engines differ from a usual one.

Run it in .venv-vllm: config_pairs.py MODEL. It prints a line of JSON: for each engine the sections
whose digests differ, and the files that the usual configuration names.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.engine.arg_utils import EngineArgs

from beluga.connectors.identity import config_fields, files_named
from beluga.connectors.vllm.plugin import register

CONNECTOR = {"kv_connector": "BelugaConnector", "kv_role": "kv_both"}
ENGINES: dict[str, dict[str, Any]] = {
    "the same": {},
    "another port": {
        "kv_events_config": {"enable_kv_cache_events": True, "endpoint": "tcp://*:5999"}
    },
    "a prefill engine": {"kv_transfer_config": CONNECTOR | {"kv_role": "kv_producer"}},
    "other steps": {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": 0.5,
    },
    "two ranks": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "another name": {"served_model_name": "other"},
    "another length": {"max_model_len": 1024},
    "another type": {"dtype": "bfloat16"},
    "another cache": {"kv_cache_dtype": "fp8"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "adapters": {"enable_lora": True},
}


def config(model: str, **options: Any) -> Any:
    usual = {"model": model, "max_model_len": 2048, "skip_tokenizer_init": True, "dtype": "float32"}
    return EngineArgs(**usual | {"kv_transfer_config": CONNECTOR} | options).create_engine_config()


def main() -> None:
    """Print what was found."""
    register()
    usual = config(sys.argv[1])
    fields = config_fields(usual)
    report: dict[str, list[str]] = {"files": [str(path) for path in files_named(usual)]}
    for name, options in ENGINES.items():
        others = config_fields(config(sys.argv[1], **options))
        report[name] = [section for section in fields if fields[section] != others.get(section)]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
