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
    the base's signature allows. Abstract methods must all exist.
    """
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from beluga.connectors.vllm.connector import BelugaConnector

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
        parse_request(path, json.dumps(body).encode(), tokenizer=tokenizer).tokens.tolist()
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


if __name__ == "__main__":
    function, *words = sys.argv[1:]
    report = globals()[function](*words)
    if report is not None:
        print(json.dumps(report))
