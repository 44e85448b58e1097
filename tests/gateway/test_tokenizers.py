# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tokenizers: the configured one is compared with the engines'; without one, the gateway uses the
model's folder that an engine reports, or its /tokenize, so that text prompts match KV events.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")
pytest.importorskip("zmq", reason="pyzmq is not installed")

from fake_engines import FakeEngine
from routed import announced, routed, until

from beluga.errors import RouterError
from beluga.gateway import tokenizers as tokenizers_module
from beluga.gateway.conversation import Conversation, Tokenizer, load_tokenizer
from beluga.gateway.engine import Health
from beluga.gateway.tokenizers import tokenize_fields

pytestmark = pytest.mark.usefixtures("quick")
PROMPT = "A whale sleeps in the sea. " * 10
HIT = len(PROMPT) // 16 * 16
CHAT = "/v1/chat/completions"


class Letters:
    """The fake engine's tokenizer, whose tokens are bytes; ``more`` is in front of a text."""

    problem = ""

    def __init__(self, more: str = "") -> None:
        self.more = more

    def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return list((self.more + text).encode())

    def chat(self, conversation: Conversation) -> list[int]:
        return self.text("".join(str(m["content"]) for m in conversation.messages))


@pytest.mark.parametrize(
    ("more", "engines_template", "kind", "text"),
    [
        ("x", "", "tokenizer", "it computes other tokens for a text"),
        ("", "<user>", "template", "it computes other tokens for a conversation"),
    ],
)
async def test_an_engine_with_another_tokenizer_is_reported(  # noqa: PLR0917
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: str,
    engines_template: str,
    kind: str,
    text: str,
) -> None:
    words = Letters(more)
    monkeypatch.setattr("beluga.gateway.service.load_tokenizer", lambda *_, **__: words)
    async with announced(tmp_path, tokenizer=tmp_path) as (site, _):
        [engine] = site.engines
        engine.template = engines_template
        [worker] = site.service.fleet
        worker.fail(
            "it was started with another template"
        )  # the worker may have been queried before
        await site.until_reported(kind, text)
        assert worker.problems.keys() == {kind}
        words.more = engine.template = ""  # the engine returns with the expected block size
        worker.fail("it was restarted")
        await until(lambda: not worker.problems)


@pytest.mark.parametrize("status", [404, 500])
async def test_an_engine_without_a_tokenize_endpoint_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("beluga.gateway.service.load_tokenizer", lambda *_, **__: Letters("x"))
    async with announced(tmp_path, tokenizer=tmp_path, tokenize_status=status) as (site, _):
        [worker] = site.service.fleet
        await until(lambda: worker.probed_after == worker.failures)
        assert worker.token_problems == {}


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[" * 100_000])
async def test_an_engine_that_fails_to_tokenize_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr("beluga.gateway.service.load_tokenizer", lambda *_, **__: Letters("x"))
    async with announced(tmp_path, tokenizer=tmp_path) as (site, _):
        [engine] = site.engines
        [worker] = site.service.fleet
        engine.tokenized = answer
        worker.fail("it is requested again")
        scrapes = engine.scrapes
        await until(lambda: engine.scrapes > scrapes + 2)
        engine.faults.healthy = False
        await until(lambda: worker.health is Health.DOWN)
        engine.faults.healthy, engine.tokenized = True, None
        await site.until_reported("tokenizer", "it computes other tokens for a text")


# ---- Without --tokenizer

Load = Callable[..., Tokenizer]


def loads(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    monkeypatch.setattr("beluga.gateway.tokenizers.load_tokenizer", load)


async def hits_text(folder: Path, **settings: Any) -> tuple[int, int, str]:
    """Start a gateway and an engine that has announced a prompt's tokens, and send the prompt.
    Returns the expected hit tokens, the engine's calls of /tokenize, and the gateway's metrics.
    """
    async with announced(folder, **settings) as (site, [announcer]):
        [worker] = site.service.fleet
        await until(lambda: worker.probed_after == worker.failures)
        announcer.stored(list(PROMPT[:HIT].encode()), 100)
        await until(lambda: site.service.index().indexer.counts.stored > 0)
        assert (await site.completed(prompt=PROMPT))[0] == 200
        return worker.hit_tokens, site.engines[0].tokenize_calls, await site.text("/metrics")


async def test_an_engine_tokenizes_prompts_for_a_gateway_without_a_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hits, calls, page = await hits_text(tmp_path)
    assert (hits, calls) == (HIT, 2)
    assert "beluga_gateway_text_prompts_total 0" in page
    assert caplog.text.count("prompts are tokenized by its /tokenize") == 1


async def test_the_models_folder_that_an_engine_reports_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[str, bool]] = []

    def load(path: Path, *, trusted: bool, is_model: bool) -> Tokenizer:
        loaded.append((str(path), is_model))
        return Letters()

    loads(monkeypatch, load)
    monkeypatch.setattr(FakeEngine, "root", "org/model")
    hits, calls, _ = await hits_text(tmp_path)
    assert (hits, calls) == (HIT, 2)  # a text and a chat are compared
    assert loaded == [("org/model", True)]


@pytest.mark.parametrize("status", [200, 404])
async def test_a_reported_folder_with_other_tokens_or_none_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    def load(*_: object, **__: object) -> Tokenizer:
        if status == 404:
            raise RouterError("the tokenizer cannot be read")
        return Letters("x")

    loads(monkeypatch, load)
    monkeypatch.setattr(FakeEngine, "root", "/models/m")
    hits, _, page = await hits_text(tmp_path, tokenize_status=status)
    assert hits == (HIT if status == 200 else 0)
    assert f"beluga_gateway_text_prompts_total {status == 404:d}" in page


async def test_a_gateway_that_finds_no_tokenizer_reports_it_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with announced(tmp_path, tokenize_status=404) as (site, _):
        await site.until_reported("tokenizer", "there is no tokenizer for its prompts")
        assert 'problem="tokenizer"' in await site.text("/metrics")
    assert "text prompts match no announced block" in caplog.text


async def test_an_engine_that_fails_to_tokenize_a_prompt_gets_no_more_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with announced(tmp_path) as (site, _):
        [engine], [worker] = site.engines, site.service.fleet
        await until(lambda: worker.probed_after == worker.failures)
        engine.tokenized = b""
        calls = engine.tokenize_calls
        for _ in range(3):
            assert (await site.completed(prompt=PROMPT))[0] == 200
        assert engine.tokenize_calls == calls + 1
        assert "beluga_gateway_text_prompts_total 3" in await site.text("/metrics")
        monkeypatch.setattr(tokenizers_module, "PAUSE_S", 0.0)
        site.service._handlers._proxy._tokenizers._paused_until_s = 0.0
        engine.tokenized = b'{"tokens": [-1]}'  # an odd answer costs no pause
        assert (await site.completed(prompt=PROMPT))[0] == 200
        engine.tokenized = None
        assert (await site.completed(prompt=PROMPT))[0] == 200
        assert "beluga_gateway_text_prompts_total 4" in await site.text("/metrics")


async def test_engines_that_are_not_followed_tokenize_no_prompts() -> None:
    async with routed(FakeEngine(), policy="linear") as site:
        [worker] = site.service.fleet
        await until(lambda: worker.probed_after == worker.failures)
        assert (await site.completed(prompt=PROMPT))[0] == 200
        assert worker.health is Health.UP and not worker.token_problems
        assert site.engines[0].tokenize_calls == 0
        assert "beluga_gateway_text_prompts_total 0" in await site.text("/metrics")


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "n": 1}, {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a"]}, None),
        ("/v1/responses", {"input": "a"}, None),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_p": 1}, ["messages"]),
        (
            CHAT,
            {"messages": [{"content": [{"type": "text"}, "b"]}], "tools": [1]},
            ["messages", "tools"],
        ),
        (CHAT, {"messages": [{"content": [{"type": "image_url"}]}]}, None),
        (CHAT, {"messages": [{"content": [7]}]}, None),
        (CHAT, {"messages": "a"}, None),
        (CHAT, {"messages": [], "reasoning_effort": "low"}, None),
    ],
)
def test_prompts_that_tokenize_renders_like_their_endpoint(
    path: str, body: dict[str, Any], fields: Any
) -> None:
    if isinstance(fields, list):
        fields = {name: body[name] for name in fields}
    assert tokenize_fields(path, json.dumps(body).encode()) == fields


def test_a_deeply_nested_request_is_not_tokenized() -> None:
    assert tokenize_fields(CHAT, b'{"messages": ' + b"[" * 100_000) is None


def test_a_models_name_is_looked_up_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    given: dict[str, Any] = {}

    def load(name: str, **options: Any) -> Any:
        given.update(options, name=name)
        raise OSError("not in the cache")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    with pytest.raises(RouterError, match="org/model cannot be read: not in the cache"):
        load_tokenizer(Path("org/model"), is_model=True)
    assert given == {"name": "org/model", "local_files_only": True}
