# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What is parsed of a request: its model, tokens and fields, and the input of a chat template."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engines import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from routed import routed, until

from beluga.errors import RouterError
from beluga.gateway import parsed_request
from beluga.gateway.conversation import (
    Conversation,
    for_template,
    load_tokenizer,
    with_system_first,
)
from beluga.gateway.parsed_request import FILE_TOKENS, TOKENIZED_SIZE_MAX, parse_request

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
QUESTION = [{"role": "user", "content": "How warm is it?"}]
FUNCTION = {"name": "weather", "description": "Tells", "parameters": {"type": "object"}}
SHOWN = {"type": "function", "function": FUNCTION}
PARTS = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": None},
         {"type": "input_text", "text": "c"}]  # fmt: skip


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
    parsed = parse_request(path, json.dumps(fields).encode(), tokenizer_of=lambda _: template)
    assert parsed.isl == 20
    [seen] = template.seen
    return seen


def rendered(path: str, **fields: Any) -> dict[str, Any]:
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
    got = rendered(CHAT, messages=QUESTION, **fields)
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
        parse_request("/v1/completions", body, tokenizer_of=lambda _: Words())
    assert seen == [True, True, False]


@pytest.mark.parametrize("name", ["chat_template", "tokenize"])
def test_settings_of_a_template_do_not_reach_the_tokenizer_itself(name: str) -> None:
    """Otherwise any client could run its own template in the router."""
    body = {"messages": QUESTION, "chat_template_kwargs": {name: "{{ 7 }}"}}
    template = Template()
    parsed = parse_request(CHAT, json.dumps(body).encode(), tokenizer_of=lambda _: template)
    assert not template.seen
    assert parsed.isl > 0


def test_responses_are_converted_to_messages_like_in_the_engine() -> None:
    assert conversation(RESPONSES, input="How warm is it?").messages == QUESTION
    assert rendered(RESPONSES, input="How warm is it?") == {}
    system = {"role": "system", "content": "Be brief."}
    got = conversation(RESPONSES, input=QUESTION, instructions="Be brief.")
    assert got.messages == [system, *QUESTION]
    flat = {"type": "function", **FUNCTION}
    assert rendered(RESPONSES, input=QUESTION, tools=[flat]) == {"tools": [SHOWN]}
    got = rendered(RESPONSES, input=QUESTION, reasoning={"effort": "low"})
    assert got == {"reasoning_effort": "low", "enable_thinking": True}
    part = {"type": "message", "role": "assistant", "status": "incomplete", "content": "It is"}
    unfinished = rendered(RESPONSES, input=[*QUESTION, part])
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
    body = json.dumps({**fields, "instructions": "Be brief."}).encode()
    parsed = parse_request(path, body, tokenizer_of=lambda _: template)
    assert parsed.isl > 0
    assert not parsed.exact
    assert not template.seen


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


# ---- Parsed requests.


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": [1, 2, 3]}, [1, 2, 3]),
        ({"prompt": [[1, 2], [3]]}, [1, 2, 3]),
        ({"input": [7]}, [7]),
        ({"prompt": []}, []),
        ({"prompt": [True, 2]}, ""),
        ({"prompt": [-1]}, ""),
        ({"prompt": ["abcd", 1, "efghi"]}, "abcdefgh"),
        ({"messages": [1, 2]}, ""),
        ({"prompt": "a \"quoted\" \\ ü\n\u4e2d"}, 'a "quoted" \\ ü\n\u4e2d'),
        ({"prompt": ["Once ", "upon a "] * 3}, "Once upon a " * 3),
        ({"input": "text" * 9, "model": "m", "encoding_format": "float"}, "text" * 9),
        ({"messages": [{"role": "system", "content": "Be brief."}, *QUESTION]},
         "Be brief.How warm is it?"),
        ({"messages": [{"role": "user", "name": "Ada", "content": PARTS, "x": {"type": "n"}}]},
         "Adaabc"),
        ({"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "a"}}],
          "messages": QUESTION}, "Be brief.How warm is it?"),
        ({"instructions": "Be brief.", "input": QUESTION}, "Be brief.How warm is it?"),
        ({"messages": [{"role": "tool", "tool_call_id": "call_0123456789", "content": "20"},
                       {"role": "assistant", "content": None, "tool_calls": [
                           {"id": "1", "type": "function",
                            "function": {"name": "f", "arguments": '{"a": 1}'}}]}]},
         '20f{"a": 1}'),
        ({"messages": QUESTION, "tools": [SHOWN]}, json.dumps([SHOWN]) + "How warm is it?"),
        ({"messages": QUESTION, "tools": None}, "How warm is it?"),
    ],
)  # fmt: skip
def test_tokens_are_ids_or_four_bytes_of_the_prompts_text(
    fields: dict[str, Any], tokens: list[int] | str
) -> None:
    """The JSON around it does not count, and neither do the fields that no template writes."""
    body = json.dumps(fields).encode()
    parsed = parse_request("/v1/completions", body)
    utf8 = json.dumps(fields, ensure_ascii=False, indent=3).encode()
    if "tools" not in fields:
        assert parse_request("/v1/completions", utf8).tokens.tolist() == parsed.tokens.tolist()
    if isinstance(tokens, str):
        text = tokens.encode()
        tokens = [int.from_bytes(text[i : i + 4], "little") for i in range(0, len(text) - 3, 4)]
    assert parsed.tokens.tolist() == tokens
    assert parsed.isl == len(tokens)
    assert parsed.body == body


def test_a_body_that_is_not_json_is_forwarded_with_an_estimated_length() -> None:
    parsed = parse_request("/v1/audio", b"x" * 17, is_json=False)
    assert (parsed.isl, len(parsed.tokens), parsed.model, parsed.stream) == (4, 0, None, False)
    assert parse_request("/v1/files", b"").isl == 0
    assert parse_request("/v1/audio", b"x" * (1 << 20), is_json=False).isl == FILE_TOKENS


def test_the_length_of_an_unusual_request_is_that_of_its_text() -> None:
    """A decoder of JSON rejects the body."""
    body = b'{"messages": [{"role": "user", "content": "%s"}], "temperature": NaN}' % (b"a" * 400)
    assert parse_request(CHAT, body).isl == 100


def test_salt_stream_and_model_are_parsed() -> None:
    parsed = parse_request("/p", b'{"model": "m", "stream": true, "cache_salt": "s"}')
    assert (parsed.model, parsed.stream, parsed.salt) == ("m", True, "s")
    parsed = parse_request("/p", b'{"stream": "yes", "cache_salt": 7}')
    assert (parsed.model, parsed.stream, parsed.salt) == (None, False, None)
    assert not parsed.odd


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": 7}', None),
        (b"[", None),
        (b'{"model": "\xff"}', None),
        (b"[" * 100_000, None),
        (b'{"model": "m", "prompt": "\\ud83d"}', "m"),
        (b'{"model": "m", "temperature": NaN}', "m"),
    ],
)
def test_unusual_requests_go_to_an_engine_of_their_model_or_to_any(
    body: bytes, model: str | None
) -> None:
    parsed = parse_request("/p", body)
    assert (parsed.model, parsed.odd, parsed.body) == (model, model is None, body)


FIELDS = ("model", "stream", "messages", "prompt", "input", "cache_salt", "previous_response_id")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(), VALUES, max_size=6))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_any_object_is_parsed(path: str, fields: dict[str, Any]) -> None:
    body, model = json.dumps(fields).encode(), fields.get("model")
    parsed = parse_request(path, body, tokenizer_of=lambda _: LetterTokenizer())
    assert (parsed.body, parsed.odd) == (body, not isinstance(model, str | None))
    assert parsed.model == (model or None if not parsed.odd else None)
    assert parsed.stream == (fields.get("stream") is True and not parsed.odd)
    assert parsed.isl == len(parsed.tokens) or parsed.odd


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(body=st.binary(max_size=300), is_json=st.booleans(), encoding=st.sampled_from(("", "gzip")))
def test_any_bytes_are_parsed(body: bytes, is_json: bool, encoding: str) -> None:
    parsed = parse_request("/v1/completions", body, is_json=is_json, encoding=encoding)
    assert parsed.body == body and parsed.isl <= len(body)


class LetterTokenizer:
    """A tokenizer for which each letter is a token."""

    def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    problem = ""

    def chat(self, conversation: Conversation) -> list[int]:
        if not conversation.messages:
            raise ValueError("no reason")
        return [len(conversation.messages)]


def test_a_tokenizer_is_used_where_it_applies() -> None:
    for body, tokens in (
        (b'{"prompt": "ab"}', [97, 98]),
        (b'{"prompt": ["a", "b"]}', [97, 98]),
        (b'{"prompt": [5]}', [5]),
        (b'{"messages": [{}, {}]}', [2]),
        (b'{"messages": []}', []),  # less than four bytes
        (b"{}", []),
    ):
        assert (
            parse_request("/p", body, tokenizer_of=lambda _: LetterTokenizer()).tokens.tolist()
            == tokens
        )


@pytest.mark.parametrize("field", ["prompt", "input", "messages", "cache_salt", "stream"])
@pytest.mark.parametrize(
    "value",
    [
        *(b'["\xff"]', b'"\xff"', b'["\\ud800"]', b'"\\ud800"', b'"\\udc00\\ud800"', b"[1e999]"),
        *(b"[" + b"9" * 5000 + b"]", b"[-1]", b"[4294967296]", b"[1.0]", b"[true]", b"[null]"),
        *(b"[[1], 2]", b"[[1], [null]]", b"{}", b"[{}]", b"[[]]", b"[]", b'""', b"NaN", b"null"),
    ],
)
def test_an_unreadable_field_is_forwarded_to_the_engine(field: str, value: bytes) -> None:
    body = b'{"model": "m", "%s": %s}' % (field.encode(), value)
    parsed = parse_request("/v1/completions", body)
    assert parsed.body == body
    assert parsed.model in ("m", None)


@pytest.mark.parametrize(("opens", "closes"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_no_depth_of_json_is_an_error(opens: bytes, closes: bytes) -> None:
    """The fields are decoded at another depth of the stack than the whole."""
    for depth in [*range(1, 1200), 3000, 20_000]:
        value = opens * depth + b"1" + closes * depth
        assert parse_request("/v1/completions", b'{"model": "m", "prompt": %s}' % value).body


PART = b'; name="model"\r\n'


def quickest_s(work: Callable[[], object]) -> float:
    """Return the shortest CPU time of several runs."""
    times_s = []
    for _ in range(3):
        started = time.process_time()
        work()
        times_s.append(time.process_time() - started)
    return min(times_s)


def test_parsing_a_form_is_linear_in_its_length() -> None:
    small, large = (PART * count for count in (1 << 9, 1 << 13))

    def read(body: bytes) -> float:
        return quickest_s(lambda: [parse_request(CHAT, body, is_json=False) for _ in range(3)])

    assert read(large) < 64 * max(read(small), 1e-4)  # with quadratic cost it would be 256 times


def test_a_forms_model_is_read_after_other_fields() -> None:
    file = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'
        b"Content-Type: audio/wav\r\n\r\n" + bytes(1 << 16) + PART * 3 + b"\r\n"
    )
    model = b'--x\r\nContent-Disposition: form-data; name="model"\r\n%s\r\norg/m\r\n--x--\r\n'
    for kind in (b"", b"Content-Type: text/plain\r\nX-More: a\r\n"):
        assert parse_request(CHAT, file + model % kind, is_json=False).model == "org/m"
    for form in (file + b"--x--", PART + b"\r\n" + b"m" * 5000 + b"\r\n--x"):
        assert parse_request(CHAT, form, is_json=False).model is None


@pytest.mark.parametrize("field", ["tools", "model", "cache_salt", "stream", "instructions"])
def test_fields_that_routing_does_not_use_are_not_decoded(field: str) -> None:
    body = b'{"messages": [], "%s": [%s1]}' % (field.encode(), b"[]," * (1 << 18))
    tracemalloc.start()
    try:
        parse_request(CHAT, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(body)  # 262,144 lists of 56 bytes each


@pytest.mark.parametrize("wrong", [b"NaN", b'"\\ud83d"'])
@pytest.mark.parametrize("size", [10, 1 << 18])
def test_the_model_of_an_unusual_body_of_any_size_is_read(wrong: bytes, size: int) -> None:
    body = b'{"prompt": "\\"model\\": \\"no\\" %s", "x": %s, "model" : "m"}' % (b"a" * size, wrong)
    parsed = parse_request(CHAT, body)
    assert (parsed.model, parsed.odd) == ("m", False)


@pytest.mark.parametrize("before", [0, 1 << 18])
def test_a_file_part_is_hashed_at_any_position(before: int) -> None:
    body = b'[{"text": "%s"}, {"url" : "%s"}, {"url": "short"}]'
    isl = {
        parse_request(CHAT, b'{"messages": %s}' % (body % (b"x" * before, b"A" * size))).isl
        for size in (5000, 1 << 19)
    }
    assert len(isl) == 1
    assert 0 <= isl.pop() - before // 4 - FILE_TOKENS < 100


class Rude:
    """A tokenizer that raises its own kind of error."""

    problem = ""

    def text(self, *_: object, **__: object) -> list[int]:
        raise IndexError("no first token")

    chat = text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_on_which_the_tokenizer_fails_is_hashed_as_text(path: str) -> None:
    fields = {"prompt": ["text"]} if path == "/v1/completions" else {"messages": QUESTION}
    parsed = parse_request(path, json.dumps(fields).encode(), tokenizer_of=lambda _: Rude())
    assert (parsed.exact, parsed.isl) == (False, 1 if "prompt" in fields else 3)


def test_a_prompt_longer_than_any_context_is_not_tokenized() -> None:
    class Counting(Rude):
        tokenized = 0

        def text(self, *_: object, **__: object) -> list[int]:
            self.tokenized += 1
            return [7]

    for length, tokenized in ((1000, 1), (TOKENIZED_SIZE_MAX, 0)):
        tokenizer = Counting()
        body = json.dumps({"prompt": "a" * length}).encode()
        parsed = parse_request("/v1/completions", body, tokenizer_of=lambda _, own=tokenizer: own)
        assert (tokenizer.tokenized, parsed.exact) == (tokenized, bool(tokenized))


def picture(content: str, question: str = "What is this?") -> bytes:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}},
        {"type": "text", "text": question},
    ]
    messages = [{"role": "user", "content": parts}]
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_an_image_counts_as_about_its_tokens_not_as_its_bytes() -> None:
    path = "/v1/chat/completions"
    short, same, other = (
        parse_request(path, picture(content, question))
        for content, question in (
            ("A" * (2 << 20), "What is this?"),
            ("A" * (2 << 20), "And who made it?"),
            ("B" * (2 << 20), "What is this?"),
        )
    )
    assert FILE_TOKENS < short.isl < FILE_TOKENS + 100
    start = FILE_TOKENS
    assert short.tokens[:start].tolist() == same.tokens[:start].tolist()
    assert short.tokens[:start].tolist() != other.tokens[:start].tolist()
    assert parse_request(path, picture("A" * 400)).isl > 100  # short ones stay as they are


def test_a_prompt_of_too_many_strings_counts_as_json_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parsed_request, "_STRINGS_MAX", 3)
    assert parsed_request.prompt_text(b'["ab", "c", "d", "e"]') == b'abcd, "e"]'


def test_a_continued_conversation_has_the_prefix_of_the_former() -> None:
    question = [{"role": "user", "content": "hello there"}]
    short, longer = (
        parse_request("/v1/completions", json.dumps({"messages": messages}).encode()).tokens
        for messages in (question, [*question, {"role": "assistant", "content": "hello"}])
    )
    assert len(longer) > len(short) == 2
    assert list(short) == list(longer[: len(short)])
