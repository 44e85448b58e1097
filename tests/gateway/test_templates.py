# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The input of a chat template: every part of a request that the engine's prompt contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engines import FakeEngine
from routed import routed, until

from beluga.errors import RouterError
from beluga.gateway.conversation import (
    Conversation,
    for_template,
    load_tokenizer,
    with_system_first,
)
from beluga.gateway.parsed_request import parse_request

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
QUESTION = [{"role": "user", "content": "How warm is it?"}]
FUNCTION = {"name": "weather", "description": "Tells", "parameters": {"type": "object"}}
SHOWN = {"type": "function", "function": FUNCTION}


class Template:
    """Records its input."""

    problem = ""

    def __init__(self) -> None:
        self.seen: list[Conversation] = []

    def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        raise AssertionError("a conversation is templated")

    def chat(self, conversation: Conversation) -> list[int]:
        self.seen.append(conversation)
        return [7] * 20


def conversation(path: str, **fields: Any) -> Conversation:
    template = Template()
    parsed = parse_request(path, json.dumps(fields).encode(), tokenizer=template)
    assert parsed.isl == 20
    [seen] = template.seen
    return seen


def given(path: str, **fields: Any) -> dict[str, Any]:
    """Return the template's input besides the messages, without the part that is the same for every
    request.
    """
    given = conversation(path, **fields).given
    usual = {"add_generation_prompt": True, "continue_final_message": False}
    return {name: value for name, value in given.items() if usual.get(name) != value}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"tools": [SHOWN]}, {"tools": [SHOWN]}),
        (
            {"tools": [{"function": {"parameters": {}, "name": "f"}, "type": "function"}]},
            {"tools": [{"type": "function",
                        "function": {"name": "f", "description": None, "parameters": {}}}]},
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"a": None, "b": "auto", "c": 0}}, {"c": 0}),
        ({"chat_template_kwargs": {"tools": []}, "tools": [SHOWN]}, {"tools": []}),
        ({"documents": [{"text": "a"}]}, {"documents": [{"text": "a"}]}),
        ({"add_generation_prompt": False, "continue_final_message": True},
         {"add_generation_prompt": False, "continue_final_message": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning": {"effort": "low"}}, {}),  # a field of responses only
    ],
)  # fmt: skip
def test_a_chat_is_rendered_like_in_the_engine(fields: Any, expected: Any) -> None:
    got = given(CHAT, messages=QUESTION, **fields)
    assert got == expected
    # a template writes the fields of a tool in their given order
    assert json.dumps(got.get("tools")) == json.dumps(expected.get("tools"))


def test_special_tokens_are_those_of_the_engine() -> None:
    """vLLM lets the tokenizer add its own to responses and completions, but not to chats."""
    assert not conversation(CHAT, messages=QUESTION).special_tokens
    assert conversation(CHAT, messages=QUESTION, add_special_tokens=True).special_tokens
    assert conversation(RESPONSES, input="Hello").special_tokens
    seen = []

    class Words(Template):
        def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
            seen.append(special_tokens)
            return [1]

    for more in ("", ', "add_special_tokens": true', ', "add_special_tokens": false'):
        body = f'{{"prompt": "a"{more}}}'.encode()
        parse_request("/v1/completions", body, tokenizer=Words())
    assert seen == [True, True, False]


@pytest.mark.parametrize("name", ["chat_template", "tokenize"])
def test_settings_of_a_template_do_not_reach_the_tokenizer_itself(name: str) -> None:
    """Otherwise any client could run its own template in the router."""
    body = {"messages": QUESTION, "chat_template_kwargs": {name: "{{ 7 }}"}}
    template = Template()
    parsed = parse_request(CHAT, json.dumps(body).encode(), tokenizer=template)
    assert not template.seen
    assert parsed.isl > 0


def test_responses_are_converted_to_messages_like_in_the_engine() -> None:
    assert conversation(RESPONSES, input="How warm is it?").messages == QUESTION
    assert given(RESPONSES, input="How warm is it?") == {}
    system = {"role": "system", "content": "Be brief."}
    got = conversation(RESPONSES, input=QUESTION, instructions="Be brief.")
    assert got.messages == [system, *QUESTION]
    flat = {"type": "function", **FUNCTION}
    assert given(RESPONSES, input=QUESTION, tools=[flat]) == {"tools": [SHOWN]}
    got = given(RESPONSES, input=QUESTION, reasoning={"effort": "low"})
    assert got == {"reasoning_effort": "low", "enable_thinking": True}
    part = {"type": "message", "role": "assistant", "status": "incomplete", "content": "It is"}
    unfinished = given(RESPONSES, input=[*QUESTION, part])
    assert unfinished == {"add_generation_prompt": False, "continue_final_message": True}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": '{"a": 1}'}


def called(name: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": '{"a": 1}'}
    return {"id": name, "function": function, "type": "function"}


def test_output_items_of_one_response_form_one_message() -> None:
    text = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Wait"}, {"type": "output_text"}],
    }
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    output = {"type": "function_call_output", "call_id": "1", "output": "20"}
    tool = {"role": "tool", "content": "20", "tool_call_id": "1"}
    got = conversation(
        RESPONSES,
        input=[
            *QUESTION,
            thought,
            text,
            call("1"),
            call("2"),
            output,
            text,
            text,
            thought,
            call("3"),
        ],
    ).messages
    answered = {"role": "assistant", "content": "Wait"}
    first = {**answered, "reasoning": "hm", "tool_calls": [called("1"), called("2")]}
    last = {**answered, "reasoning": "hm", "tool_calls": [called("3")]}
    assert got == [*QUESTION, first, tool, answered, last]
    got = conversation(RESPONSES, input=[*QUESTION, thought, call("1"), output, *QUESTION]).messages
    calling = {"role": "assistant", "reasoning": "hm", "tool_calls": [called("1")]}
    assert got == [*QUESTION, calling, tool, *QUESTION]
    custom = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "ä"}
    [made] = conversation(RESPONSES, input=[custom]).messages
    assert made["tool_calls"][0]["function"]["arguments"] == '{"input": "ä"}'


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"input": QUESTION, "previous_response_id": "resp_1"}),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "1"}]}),
        (
            RESPONSES,
            {"input": [{"type": "reasoning", "encrypted_content": "x", "content": []}]},
        ),
        (RESPONSES, {"input": QUESTION, "tools": [{"type": "web_search"}]}),
        ("/v1/messages", {"system": "Be brief.", "messages": QUESTION}),  # Anthropic's form
    ],
)
def test_prompts_that_only_an_engine_can_template_are_hashed_as_text(
    path: str, fields: Any
) -> None:
    template = Template()
    parsed = parse_request(path, json.dumps(fields).encode(), tokenizer=template)
    assert parsed.isl > 0
    assert not parsed.exact
    assert not template.seen


PARTS = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": None},
         {"type": "input_text", "text": "c"}]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "text", "parts"),
    [("a", "a", ["a"]), (None, "", []), (PARTS, "a\nb\nc", ["a", "b", "c"]), ([], "", [])],
)
def test_message_contents_have_the_format_of_the_template(
    content: Any, text: str, parts: list[str]
) -> None:
    for role in ("user", "tool"):
        message = {"role": role, "content": content}
        [whole] = for_template([message], as_parts=False)
        assert whole["content"] == text
        [cut] = for_template([message], as_parts=True)
        shown = [{"type": "text", "text": part} for part in parts]
        assert cut["content"] == (text if role == "tool" else shown)


def test_an_image_is_not_hashed_as_text() -> None:
    with pytest.raises(KeyError):
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        for_template([{"role": "user", "content": [image]}], as_parts=True)


def test_tool_calls_have_their_fields_in_the_engines_order() -> None:
    """A template writes these fields."""
    [made] = conversation(
        CHAT, messages=[{"role": "assistant", "tool_calls": [called("1")]}]
    ).messages
    order = {"id": "1", "function": {"arguments": '{"a": 1}', "name": "f"}, "type": "function"}
    assert json.dumps(made["tool_calls"]) == json.dumps([order])


def test_messages_have_the_fields_that_the_engine_keeps() -> None:
    calls = [
        called("1"),
        {"id": "2", "type": "function", "function": {"name": "g"}},
        {"id": "3", "type": "function", "function": {"name": "h", "arguments": "[1"}},
    ]
    got = for_template(
        [
            {"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief.", "x": 1},
            {"role": "user", "content": "a", "name": "Ada", "tool_calls": calls},
            {"role": "assistant", "tool_calls": calls, "reasoning_content": "hm"},
            {"role": "assistant", "content": "b", "tool_calls": []},
            {"role": "tool", "content": "20", "tool_call_id": "1"},
        ],
        as_parts=False,
    )
    made = got[2].pop("tool_calls")
    assert [call["function"].get("arguments") for call in made] == [{"a": 1}, {}, {}]
    assert got == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a", "name": "Ada"},
        {"role": "assistant", "content": "", "reasoning": "hm", "reasoning_content": "hm"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "20", "tool_call_id": "1"},
    ]


def test_the_developer_role_becomes_system_if_the_template_lacks_it() -> None:
    answered = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "developer", "content": [{"type": "text", "text": "c"}], "tools": None},
    ]
    assert with_system_first(answered) == [{"role": "system", "content": "a\n\nc"}, answered[1]]
    assert with_system_first(answered[:2]) == answered[:2]
    assert with_system_first(answered[1:2]) == answered[1:2]
    assert with_system_first(answered[2:]) == [
        {"role": "system", "content": answered[2]["content"]}
    ]


async def test_a_tokenizer_without_a_template_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(Template):
        problem = "the tokenizer has no chat template"

        def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
            return list(text.encode())  # as the fake engine does

    monkeypatch.setattr("beluga.gateway.service.load_tokenizer", lambda *_, **__: Plain())
    async with routed(FakeEngine(), policy="linear", tokenizer=tmp_path) as site:
        [engine] = site.service.fleet
        await until(lambda: "template" in engine.problems)
        [worker] = await site.workers()
        assert worker["problems"]["template"] == Plain.problem
        assert 'problem="template"' in await site.text("/metrics")


def test_a_template_requires_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(RouterError, match="needs --tokenizer with a model's folder"):
        load_tokenizer(tmp_path / "tokenizer.json", tmp_path / "template")
