# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Requests of every kind that clients send with OpenAI's SDK, each with its own prompt."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from beluga_bench.vllm.prompts import prompt

ANSWER_TOKENS = 1
PATHS = {
    "completions.create": "/v1/completions",
    "chat.completions.create": "/v1/chat/completions",
    "responses.create": "/v1/responses",
}

Call = tuple[str, dict[str, Any]]  # a method of the SDK and its arguments


def words(seed: int, count: int = 120) -> str:
    """Return that many random words; with another seed all words differ."""
    letters = random.Random(seed)
    return " ".join(
        "".join(letters.choices("etaoinshrdlu", k=letters.randint(2, 9))) for _ in range(count)
    )


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


WEATHER = {
    "description": "Tells the weather of a place.",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": []},
}
TOOLS = [{"type": "function", "function": WEATHER}]
FLAT_TOOLS = [{"type": "function", **WEATHER, "strict": True}]
ARGUMENTS = '{"place": "the sea", "days": [1, 2]}'


def _complete(**more: Any) -> Call:
    return "completions.create", {"max_tokens": ANSWER_TOKENS, **more}


def _chat(*messages: dict[str, Any], **more: Any) -> Call:
    given = {"messages": list(messages), "max_completion_tokens": ANSWER_TOKENS, **more}
    return "chat.completions.create", given


def _respond(content: Any, **more: Any) -> Call:
    return "responses.create", {"input": content, "max_output_tokens": ANSWER_TOKENS, **more}


def _chat_after_a_call(seed: int) -> Call:
    function = {"name": "weather", "arguments": ARGUMENTS}
    call = {"type": "function", "id": "call_1", "function": function}
    answer = [{"type": "text", "text": "It is"}, {"type": "text", "text": "warm."}]
    return _chat(
        user(words(seed)),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": answer},
        tools=TOOLS,
    )


def _response_after_a_call(seed: int) -> Call:
    name = {"call_id": "call_1"}
    return _respond(
        [
            user(words(seed)),
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]},
            {"type": "function_call", **name, "name": "weather", "arguments": ARGUMENTS},
            {"type": "function_call_output", **name, "output": "It is warm."},
            {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
        ],
        tools=FLAT_TOOLS,
    )  # fmt: skip


KINDS: dict[str, Callable[[int], Call]] = {
    "completion": lambda seed: _complete(prompt=words(seed)),
    "completion of ids": lambda seed: _complete(prompt=prompt(300, seed)),
    "streamed completion": lambda seed: _complete(prompt=words(seed), stream=True),
    "chat": lambda seed: _chat({"role": "system", "content": "Be brief."}, user(words(seed))),
    "streamed chat": lambda seed: _chat(user(words(seed)), stream=True),
    "chat in parts": lambda seed: _chat(
        user([{"type": "text", "text": words(seed)}, {"type": "text", "text": "Why?"}])
    ),
    "chat with a developer": lambda seed: _chat(
        user(words(seed)), {"role": "developer", "content": "Be brief."}, user("Why?")
    ),
    "chat with tools": lambda seed: _chat(user(words(seed)), tools=TOOLS),
    "chat after a call": _chat_after_a_call,
    "chat with settings": lambda seed: _chat(
        user(words(seed)),
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"mood": "calm", "unset": None}},
    ),
    "chat that goes on": lambda seed: _chat(
        user(words(seed)),
        {"role": "assistant", "content": "It is"},
        extra_body={"add_generation_prompt": False, "continue_final_message": True},
    ),
    "response": lambda seed: _respond(words(seed)),
    "response with tools": lambda seed: _respond(
        [user(words(seed))], instructions="Be brief.", tools=FLAT_TOOLS
    ),
    "response after a call": _response_after_a_call,
    "response with reasoning": lambda seed: _respond(words(seed), reasoning={"effort": "high"}),
}
"""By name: a call for a seed. Equal seeds give equal prompts."""


def request(call: Call) -> tuple[str, dict[str, Any]]:
    """Return the path and the body that the SDK sends for a call."""
    method, arguments = call
    body = {name: value for name, value in arguments.items() if name != "extra_body"}
    return PATHS[method], body | arguments.get("extra_body", {})
