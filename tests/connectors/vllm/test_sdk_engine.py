# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Clients of OpenAI's SDK get the same results from the gateway as from a real engine."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")
pytest.importorskip("openai", reason="OpenAI's SDK is not installed")

from beluga_bench.vllm.arm import Setting
from beluga_bench.vllm.model import model
from beluga_bench.vllm.serve import server
from support.sdk_cases import CASES, Caller, calling, observe

from beluga.gateway import Address, Limits, Service, Settings, read_engines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the packages may have to be installed

UP_S = 30.0
# The tiny model has none, and without one an engine refuses all chats.
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<assistant>"
)
# How many tokens the engine puts into a chunk depends on timing.
_BY_CHUNK = {"stream_left_early", "stream_of_bytes", "stream_helper"}
# An engine of a text model has no such path; both respond with 404, the gateway because of the
# model.
_NO_PATH = {"embeddings_unknown_model", "transcription_unknown_model"}
# The engine makes these again for each answer.
_OWN = re.compile(r"^(id|.*_id|created|.*_at|system_fingerprint|permission)$")


def settled(value: Any) -> Any:
    """Return the results without generated names and times."""
    if isinstance(value, dict):
        return {
            name: type(item).__name__ if _OWN.match(str(name)) else settled(item)
            for name, item in value.items()
            if name != "vary"  # the gateway's own answers have no CORS headers
        }
    if isinstance(value, list | tuple):
        return [settled(item) for item in value]
    if isinstance(value, str) and value.startswith('data: {"id"'):  # a line of a stream
        return re.sub(r'"(id|created)": ?("[^"]*"|\d+)', r'"\1"', value)
    if isinstance(value, str):  # only an engine has its other names
        value = re.sub(r" Valid aliases: .*?\.(?=$|')", "", value)
        return re.sub(r"\b0x[0-9a-f]+\b", "ADDRESS", value)
    return value


def folded(seen: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the chunks of a stream merged: for each choice the kinds of its
    chunks in order, and its text.
    """
    kinds: dict[Any, list[Any]] = {}
    texts: dict[Any, str] = {}

    def note(whose: Any, kind: Any, text: str | None) -> None:
        if kind not in kinds.setdefault(whose, [])[-1:]:
            kinds[whose].append(kind)
        texts[whose] = texts.get(whose, "") + (text or "")

    for name, fields in seen["chunks"]:
        for choice in fields.get("choices") or ():
            part = choice.get("delta") or choice
            kind = [name, part.get("role"), bool(part.get("tool_calls"))]
            note(choice["index"], kind, part.get("content") or part.get("text"))
            if choice.get("finish_reason"):  # alone, or with the last token
                note((choice["index"], "end"), choice["finish_reason"], None)
        if not fields.get("choices"):
            delta = fields.get("delta")
            kind = [name, fields.get("type"), fields.get("usage")]
            note("all", kind, delta if isinstance(delta, str) else None)
    return {**seen, "chunks": [kinds, texts]}


async def both(engine_url: str, name: str) -> dict[str, tuple[Any, Any]]:
    """Run all cases with the engine and with the gateway. Returns the differences."""
    settings = Settings(
        policy="least-tokens",
        engines=read_engines([engine_url]),
        listen=Address("127.0.0.1", 0),
        admin=None,
        advise_s=0,
        limits=Limits(health_interval_s=0.2),
    )
    different = {}
    async with Service(settings) as service:
        url = "http://{}:{}".format(*service.address)
        deadline = asyncio.get_running_loop().time() + UP_S
        while not any(engine.serving for engine in service.fleet):
            assert asyncio.get_running_loop().time() < deadline, "the engine is not up"
            await asyncio.sleep(0.05)
        async with calling(engine_url, name) as straight, calling(url, name) as through:
            # Its first request is slow, and fills its cache.
            assert "result" in await observe(Caller.chat, *straight)
            for case, run in CASES.items():
                if case in _BY_CHUNK | _NO_PATH:
                    continue
                expected = settled(folded(await observe(run, *straight)))
                observed = settled(folded(await observe(run, *through)))
                if observed != expected:
                    different[case] = expected, observed
        while any(engine.inflight for engine in service.fleet):
            assert asyncio.get_running_loop().time() < deadline + 600, "a request is left running"
            await asyncio.sleep(0.05)
    return different


def test_requests_behave_as_without_the_gateway_on_a_real_engine(
    vllm_python: str, tmp_path: Path
) -> None:
    made = model("tiny", vllm_python)
    setting = Setting(
        folder=tmp_path, model=made, size_name="tiny", tokens=2048, python=vllm_python
    )
    template = tmp_path / "chat_template.jinja"
    template.write_text(TEMPLATE)
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with server(setting, "sdk", None, chat_template=str(template), **options) as engine:
        engine.ready()
        different = asyncio.run(both(engine.url, engine.model))
        running = engine.metric("vllm:num_requests_running")
    for name, (expected, observed) in different.items():
        print(f"{name}\n  straight {expected}\n  gateway  {observed}")
    # The gateway rejects forms with 415; vLLM responds with 400.
    assert sorted(different) == ["raw_other_kind", "raw_text_kind"]
    assert running == 0
