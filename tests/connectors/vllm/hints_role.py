# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Takes hints through vLLM's own classes, and prints what our connector reads. Run it in
.venv-vllm.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.hints import ACTION, Requests

REQUESTS = Requests(ConnectorCounters(), logging.getLogger("hints"))
HINT = {"pin": True, "ttl": 600.0, "prefetch": True}


def read(body: Any, **given: Any) -> list[Any]:
    """Return what our connector reads of a body, and whether its session is there."""
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
    hint = REQUESTS.hint(request)
    REQUESTS.own_from(request, 0)
    return [hint.priority, hint.ttl, hint.pin, hint.prefetch, REQUESTS.begun(request)]


def chat(**fields: Any) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    return ChatCompletionRequest.model_validate({"model": "m", "messages": messages, **fields})


def main() -> None:
    action = KvHintAction("1", ACTION, "1", {"priority": "high", "ttl": 60.0})
    completion = {
        "model": "m",
        "prompt": "hello",
        "kv_transfer_params": {"beluga": {"priority": "low"}, "do_remote_decode": False},
        "session_id": "other",
    }
    report = {
        "chat": read(chat(kv_transfer_params={"beluga": HINT}, session_id="one")),
        "completion": read(CompletionRequest.model_validate(completion)),
        "priority": read(chat(priority=-3)),
        "envelope": read(chat(), kv_hints=KvHintsEnvelope("1", "m", [action])),
        "extra": read(chat(vllm_xargs={"beluga": "low"})),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
