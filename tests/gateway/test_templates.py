# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a chat template gets: all of a request that is part of the engine's prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")
pytest.importorskip("xxhash", reason="the router's packages are not installed")

from fake_engine import FakeEngine
from routed import routed, run, until

from beluga.errors import RouterError
from beluga.gateway.parsed_request import parse_request
from beluga.gateway.tokenizer import load_tokenizer

ASKED = [{"role": "user", "content": "How warm is it?"}]
FUNCTION = {"name": "weather", "description": "Tells", "parameters": {"type": "object"}}
SHOWN = {"type": "function", "function": FUNCTION}


class Template:
    """Keeps what it was given."""

    problem = ""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def text(self, text: str) -> list[int]:
        raise AssertionError("a conversation is templated")

    def chat(self, messages: list[dict[str, Any]], given: object) -> list[int]:
        self.seen.append((messages, given))
        return [7] * 20


def templated(path: str, **fields: Any) -> tuple[Any, Any]:
    template = Template()
    parsed = parse_request(path, json.dumps(fields).encode(), tokenizer=template)
    assert parsed.isl == 20
    [seen] = template.seen
    return seen


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({}, {}),
        ({"tools": [SHOWN]}, {"tools": [SHOWN]}),
        (
            {"tools": [{"function": {"parameters": {}, "name": "f"}, "type": "function"}]},
            {"tools": [{"type": "function",
                        "function": {"name": "f", "description": None, "parameters": {}}}]},
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"documents": [{"text": "a"}]}, {"documents": [{"text": "a"}]}),
        ({"add_generation_prompt": False, "continue_final_message": True},
         {"add_generation_prompt": False, "continue_final_message": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
    ],
)  # fmt: skip
def test_a_chat_is_templated_with_all_that_the_engine_templates(fields: Any, given: Any) -> None:
    got = templated("/v1/chat/completions", messages=ASKED, **fields)
    assert got == (ASKED, given)
    # a template writes a tool's fields in their order
    assert json.dumps(got[1].get("tools")) == json.dumps(given.get("tools"))


def test_responses_are_templated_as_the_engine_makes_messages_of_them() -> None:
    path = "/v1/responses"
    assert templated(path, input="How warm is it?") == (ASKED, {})
    system = {"role": "system", "content": "Be brief."}
    assert templated(path, input=ASKED, instructions="Be brief.") == ([system, *ASKED], {})
    flat = {"type": "function", **FUNCTION}
    assert templated(path, input=ASKED, tools=[flat]) == (ASKED, {"tools": [SHOWN]})
    got = templated(path, input=ASKED, reasoning={"effort": "low"})
    assert got[1] == {"reasoning_effort": "low", "enable_thinking": True}


def test_a_tokenizer_without_a_template_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(Template):
        problem = "the tokenizer has no chat template"

    monkeypatch.setattr("beluga.gateway.service.load_tokenizer", lambda *_: Plain())

    async def scenario() -> None:
        async with routed(FakeEngine(), policy="linear", tokenizer=tmp_path) as site:
            [engine] = site.service.fleet
            await until(lambda: "template" in engine.problems)
            [worker] = await site.workers()
            assert worker["problems"]["template"] == Plain.problem
            assert 'problem="template"' in await site.text("/metrics")

    run(scenario)


def test_a_template_needs_a_models_directory(tmp_path: Path) -> None:
    with pytest.raises(RouterError, match="needs --tokenizer with a model's directory"):
        load_tokenizer(tmp_path / "tokenizer.json", tmp_path / "template")
