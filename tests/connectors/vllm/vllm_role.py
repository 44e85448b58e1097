# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Functions that run with vLLM's Python, in .venv-vllm: ``vllm_role.py FUNCTION ARGUMENT...``.

Each prints its report as one line of JSON. Its input, if any, is JSON, too. What they import
differs, so each imports it itself.
"""

from __future__ import annotations

import inspect
import json
import logging
import operator
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


# ---- Which differences between configurations count.

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


def config_pairs(model: str) -> dict[str, list[str]]:
    """Return in which sections engines of a real vLLM differ from a usual one, and the files that
    the usual configuration names.
    """
    from vllm.engine.arg_utils import EngineArgs

    from beluga.connectors.identity import config_fields, files_named
    from beluga.connectors.vllm.plugin import register

    def config(**options: Any) -> Any:
        usual = {"model": model, "max_model_len": 2048, "skip_tokenizer_init": True}
        usual |= {"dtype": "float32", "kv_transfer_config": CONNECTOR}
        return EngineArgs(**usual | options).create_engine_config()

    register()
    usual = config()
    fields = config_fields(usual)
    report: dict[str, list[str]] = {"files": [str(path) for path in files_named(usual)]}
    for name, options in ENGINES.items():
        others = config_fields(config(**options))
        report[name] = [section for section in fields if fields[section] != others.get(section)]
    return report


# ---- The pool as a tier of vLLM's own offloading.


def tier(model: str, pool: str, what: str) -> dict[str, Any]:
    """Store or load chunks below the memory of vLLM's own offloading, as its scheduler does.

    vLLM's workers copy only to GPUs, so this fills and compares the memory itself.
    """
    import time

    import numpy as np
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob

    entry = {"type": "beluga", "module_path": "beluga.connectors.vllm.tier", "pool": pool}
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 4 << 20,
            "secondary_tiers": [entry | {"timeout_ms": 5000}],
        },
    }
    config = EngineArgs(
        model=model, skip_tokenizer_init=True, dtype="float32", kv_transfer_config=transfer
    ).create_engine_config()
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size, num_kv_heads=2, head_size=16, dtype=torch.float32
    )
    layers = [f"layers.{i}" for i in range(2)]
    caches = KVCacheConfig(8, [], [KVCacheGroupSpec(layers, spec)])
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
    manager = connector.connector_scheduler.manager
    (below,) = manager.secondary_tiers
    chunks = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
    count, context = min(len(chunks), 16), ReqContext(req_id="a")
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(count)]
    expected = np.random.default_rng(7).integers(0, 256, (count, chunks.shape[1]), np.uint8)
    end = time.monotonic() + 60
    while True:
        answers = [below.lookup(key, context) for key in keys]
        if LookupResult.RETRY not in answers or time.monotonic() > end:
            break
        below.on_schedule_end(None)
        time.sleep(0.01)
    if what == "store":
        chunks[:count] = expected
    submit = below.submit_store if what == "store" else below.submit_load
    submit(TransferJob(1, keys, np.arange(count), what == "load", context))
    while not (results := list(below.get_finished_jobs())) and time.monotonic() < end:
        time.sleep(0.01)
    report = {
        "hits": [answer is LookupResult.HIT for answer in answers],
        "done": [result.success for result in results],
        "equal": bool((chunks[:count] == expected).all()),
    }
    del chunks
    connector.shutdown()
    return report


# ---- Whether our overrides fit the installed vLLM.

# Hooks that vLLM calls since 0.33.
SINCE_0_33 = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def narrower(ours: Any, base: Any) -> str:
    """Return what the base's signature accepts and ours does not."""
    mine, theirs = (
        list(inspect.signature(function).parameters.values()) for function in (ours, base)
    )
    for index, wanted in enumerate(theirs):
        if wanted.kind in VARIADIC:
            continue
        if index >= len(mine) or mine[index].kind in VARIADIC:
            if not any(parameter.kind in VARIADIC for parameter in mine):
                return f"has no {wanted.name}"
            continue
        if mine[index].name != wanted.name:
            return f"calls {mine[index].name} what is {wanted.name}"
        if wanted.default is not wanted.empty and mine[index].default is wanted.empty:
            return f"requires {wanted.name}"
    known = {parameter.name for parameter in theirs}
    more = [
        own.name
        for own in mine
        if own.kind not in VARIADIC and own.default is own.empty and own.name not in known
    ]
    # A newer optional parameter of ours is harmless; one without a default is not.
    return f"requires {', '.join(more)}" if more else ""


def interfaces() -> dict[str, Any]:
    """Compare our overrides with the installed vLLM.

    For each public method that our connector overrides, our signature must allow every call that
    the base's signature allows. Abstract methods must all exist, and the router must read every
    field of the engine's events.
    """
    import vllm
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from beluga.connectors.vllm.connector import BelugaConnector
    from beluga.router import events

    base = type("Base", (KVConnectorBase_V1, SupportsHMA), {})
    wrong = [f"it lacks {name}" for name in sorted(BelugaConnector.__abstractmethods__)]
    for name in vars(BelugaConnector):
        ours = getattr(BelugaConnector, name)
        if not callable(ours) or (name.startswith("_") and name != "__init__"):
            continue
        if name in SINCE_0_33 and vllm.__version__.startswith("0.32."):
            continue
        if not hasattr(base, name):
            wrong.append(f"{name} overrides nothing")
        elif problem := narrower(ours, getattr(base, name)):
            wrong.append(f"{name} {problem}")
    for event in (BlockStored, BlockRemoved):
        unread = set(event.__struct_fields__) - events._NAMES[event.__name__]
        wrong += [f"the router does not read {event.__name__}.{name}" for name in sorted(unread)]
    # what we announce for two blocks of a request with an adapter, an image and a salt
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=1, length=2))
    request: Any = SimpleNamespace(
        lora_request=SimpleNamespace(lora_name="tuned", lora_path="p"),
        mm_features=[image],
        cache_salt="salt",
        prompt_embeds=None,
    )
    connector: Any = SimpleNamespace(_block_size=4)
    extra_keys = BelugaConnector._extra_keys_of(connector, request, 0, 2)
    return {"version": vllm.__version__, "misfits": wrong, "extra_keys": extra_keys}


def registered() -> list[str]:
    """Return the class that vLLM finds by our connector's name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    kind = KVConnectorFactory.get_connector_class_by_name("BelugaConnector")
    return [kind.__module__, kind.__name__]


def serve_arguments() -> list[str]:
    """Parse command lines as ``vllm serve`` would; each is a list of words. Returns the KV
    connector of each. A command line that vLLM refuses ends the process with an error.
    """
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    connectors = []
    for words in json.load(sys.stdin):
        parser = FlexibleArgumentParser(prog="vllm")
        (command,) = cmd_init()
        command.subparser_init(parser.add_subparsers(dest="subparser"))
        config = parser.parse_args(words).kv_transfer_config
        connectors.append(getattr(config, "kv_connector", None) or config["kv_connector"])
    return connectors


# ---- Requests.


def hints() -> dict[str, list[Any]]:
    """Take hints through vLLM's own classes. Returns what our connector reads of each body, and
    whether its session has begun.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
    from vllm.v1.request import Request

    from beluga.connectors.vllm.counters import ConnectorCounters
    from beluga.connectors.vllm.hints import ACTION, Requests

    requests = Requests(ConnectorCounters(), logging.getLogger("hints"))

    def read(body: Any, **given: Any) -> list[Any]:
        request = Request(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            sampling_params=body.to_sampling_params(16, {}),
            pooling_params=None,
            priority=body.priority,
            session_id=body.session_id,
            **given,
        )
        request.block_hashes = [bytes(32)]
        hint = requests.hint(request)
        requests.own_from(request, 0)
        return [hint.priority, hint.ttl, hint.pin, hint.prefetch, requests.begun(request)]

    def chat(**fields: Any) -> Any:
        messages = [{"role": "user", "content": "hello"}]
        return ChatCompletionRequest.model_validate({"model": "m", "messages": messages, **fields})

    pin = {"beluga": {"pin": True, "ttl": 600.0, "prefetch": True}}
    action = KvHintAction("1", ACTION, "1", {"priority": "high", "ttl": 60.0})
    completion = {
        "model": "m",
        "prompt": "hello",
        "kv_transfer_params": {"beluga": {"priority": "low"}, "do_remote_decode": False},
        "session_id": "other",
    }
    return {
        "chat": read(chat(kv_transfer_params=pin, session_id="one")),
        "completion": read(CompletionRequest.model_validate(completion)),
        "priority": read(chat(priority=-3)),
        "envelope": read(chat(), kv_hints=KvHintsEnvelope("1", "m", [action])),
        "extra": read(chat(vllm_xargs={"beluga": "low"})),
    }


def hashed_tokens() -> list[list[int]]:
    """Return the tokens that ``beluga gateway`` hashes of requests. The input is
    ``{"tokenizer": FOLDER, "requests": [[PATH, BODY], ...]}``.
    """
    from beluga.gateway.conversation import load_tokenizer
    from beluga.gateway.parsed_request import parse_request

    given = json.load(sys.stdin)
    tokenizer = load_tokenizer(Path(given["tokenizer"]), trusted=True)
    return [
        parse_request(
            path, json.dumps(body).encode(), tokenizer_of=lambda _: tokenizer
        ).tokens.tolist()
        for path, body in given["requests"]
    ]


def sdk_calls() -> None:
    """Call OpenAI's SDK. Each line of the input is a list of calls, which run at once. A call is a
    base URL, a method such as ``chat.completions.create``, and its arguments. The reply is a line:
    for each call null, or the text of an error.
    """
    import openai

    def call(requested: tuple[str, str, dict[str, Any]]) -> str | None:
        url, method, arguments = requested
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        try:
            answer = operator.attrgetter(method)(client)(**arguments)
            if arguments.get("stream"):
                for _ in answer:
                    pass
        except openai.OpenAIError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(8) as threads:
        for line in sys.stdin:
            print(json.dumps(list(threads.map(call, json.loads(line)))), flush=True)


def subscribe(endpoint: str) -> None:
    """Print "ready", then the medium, tokens, size and kind of every block that an engine
    announces.
    """
    import msgspec
    import zmq
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    socket = zmq.Context().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.subscribe(b"")
    print("ready", flush=True)
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    while True:
        _, _, payload = socket.recv_multipart()
        for event in decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                kind = event.kv_cache_spec_kind
                print(
                    json.dumps([event.medium, event.token_ids, event.block_size, kind]), flush=True
                )


# ---- Models with random weights, without downloads: hybrids of each combination of groups, and
# others.

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


def _make_model(folder: Path, name: str) -> None:
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


def _make_adapters(model: Path) -> None:
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


def hybrid_models(folder: str, *names: str) -> list[str]:
    """Make these models in a folder, gemma3 with adapters."""
    for name in names:
        _make_model(Path(folder) / name, name)
        if name == "gemma3":
            _make_adapters(Path(folder) / name)
    return list(names)


if __name__ == "__main__":
    function, *words = sys.argv[1:]
    report = globals()[function](*words)
    if report is not None:
        print(json.dumps(report))
