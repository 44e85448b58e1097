# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Cases of clients with OpenAI's SDK. A case runs directly with an engine and through the gateway,
and must get the same: results, the types and order of a stream's chunks, exceptions with their
fields, statuses and headers.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai

# Headers that depend on the connection or the time. The bodies of responses are compared
# themselves.
_UNCOMPARED = (
    *("date", "server", "connection", "keep-alive", "transfer-encoding", "content-length"),
    *("x-beluga-worker", "x-beluga-hit-rate"),
)
_PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "place",
        "schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_CHAT, _COMPLETIONS = "/chat/completions", "/completions"


@dataclasses.dataclass
class Caller:
    """A client of one server."""

    url: str  # without /v1
    model: str
    client: openai.AsyncOpenAI
    http: Any  # the SDK's own HTTP client

    async def chat(self, text: Any = "Where are you?", **more: Any) -> Any:
        given = {"model": self.model, "temperature": 0, "max_tokens": 20, **more}
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        return await self.client.chat.completions.create(messages=messages, **given)

    async def complete(self, prompt: Any = "Once upon a time", **more: Any) -> Any:
        given = {"model": self.model, "temperature": 0, "max_tokens": 12, **more}
        return await self.client.completions.create(prompt=prompt, **given)

    async def respond(self, content: Any = "Where are you?", **more: Any) -> Any:
        given = {"model": self.model, "temperature": 0, "max_output_tokens": 20, **more}
        return await self.client.responses.create(input=content, **given)

    async def post(self, path: str, body: Any, kind: str = "application/json", **more: Any) -> Any:
        """Send these bytes, or this as JSON."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        headers = {"Content-Type": kind, **more}
        return await self.client.post(
            path, cast_to=object, content=body, options={"headers": headers}
        )

    async def request(self, method: str, path: str, **headers: str) -> Any:
        """Return status and body of a request that the SDK has no call for."""
        fields = {name.replace("_", "-"): text for name, text in headers.items()}
        fields.setdefault("Authorization", f"Bearer {self.client.api_key}")
        answer = await self.http.request(method, f"{self.url}/v1{path}", headers=fields)
        return answer.status_code, answer.text

    def other(self, **options: Any) -> Caller:
        """Return this caller with other options of the client."""
        return dataclasses.replace(self, client=self.client.with_options(**options))


Case = Callable[[Caller], Awaitable[Any]]
CASES: dict[str, Case] = {}


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


def chat(name: str, text: Any = "Where are you?", **more: Any) -> None:
    CASES[f"chat_{name}"] = lambda caller: caller.chat(text, **more)


def complete(name: str, prompt: Any = "Once upon a time", **more: Any) -> None:
    CASES[f"completion_{name}"] = lambda caller: caller.complete(prompt, **more)


def respond(name: str, content: Any = "Where are you?", **more: Any) -> None:
    CASES[f"response_{name}"] = lambda caller: caller.respond(content, **more)


def raw(name: str, path: str, body: Any, kind: str = "application/json", **more: str) -> None:
    CASES[f"raw_{name}"] = lambda caller: caller.post(path, body, kind, **more)


_USAGE = {"include_usage": True}
_OFTEN = {"include_usage": True, "continuous_usage_stats": True}
_UNICODE = 'Grüße, 日本語, 🐋👩‍👩‍👧, \u0000, \u2028, \\u00e9, "quoted"\r\n\ttab'
_ODD_ROLES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Hi."}]},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And now?", "name": "ann"},
]
_AFTER_A_CALL = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call-0",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call-0", "content": "rain"},
]


def _seen(url: str) -> list[dict[str, Any]]:
    contents = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    return [{"role": "user", "content": contents}]


chat("plain")
chat("several", n=3, temperature=1.0, seed=7)
chat("logprobs", logprobs=True, top_logprobs=3)
chat("stop", stop="STOP")
chat("stops", stop=["never", "aus"])
chat("seed", seed=42)
chat("unicode", _UNICODE)
chat("roles", _ODD_ROLES)
chat("json", response_format={"type": "json_object"})
chat("schema", response_format=_SCHEMA)
chat("tools", tools=[_WEATHER, _TIME])
chat("one_call", tools=[_WEATHER, _TIME], parallel_tool_calls=False)
chat("no_call", tools=[_WEATHER], tool_choice="none")
chat("after_a_call", _AFTER_A_CALL, tools=[_WEATHER])
chat("image", _seen(_PIXEL))
chat("large_image", _seen("data:image/png;base64," + "A" * (1 << 21)))
chat("engines_own_fields", extra_body={"top_k": 3, "min_p": 0.1, "ignore_eos": True})
chat("headers_and_query", extra_headers={"X-Own": "1"}, extra_query={"a": "b c"})
chat("request_id", extra_headers={"X-Request-Id": "my-own-7"})
chat("stream", stream=True)
chat("stream_several", stream=True, n=2)
chat("stream_usage", stream=True, stream_options=_USAGE)
chat("stream_usage_often", stream=True, stream_options=_OFTEN)
chat("stream_logprobs", stream=True, logprobs=True, top_logprobs=2)
chat("stream_tools", stream=True, tools=[_WEATHER, _TIME])
chat("stream_unicode", _UNICODE, stream=True, extra_headers={"X-Request-Id": "my-own-8"})
chat("stream_breaks", stream=True, user="break")
chat("unknown_model", model="another")
chat("stream_unknown_model", model="another", stream=True)
chat("too_long", "too long " * 5000)
chat("stream_too_long", "too long " * 5000, stream=True)
chat("penalty_out_of_range", presence_penalty=7)
chat("usage_without_stream", stream_options=_USAGE)
complete("plain")
complete("several", n=2, temperature=1.0, seed=3)
complete("batch", ["One", "Two", "Drei 🐋"])
complete("ids", [1, 2, 3])
complete("batch_of_ids", [[1, 2, 3], [4, 5]])
complete("logprobs", logprobs=2)
complete("stop", stop=["STOP", "aus"])
complete("length", max_tokens=2)
complete("stream", stream=True)
complete("stream_batch", ["One", "Two"], stream=True, stream_options=_USAGE)
complete("unknown_model", model="another")
complete("too_long", list(range(3, 9000)))
respond("plain")
respond("instructions", instructions="Be short.", metadata={"a": "b"})
respond("messages", [{"role": "user", "content": "Where are you?"}])
respond("stream", stream=True)
respond("unknown_model", model="another")
respond("stream_unknown_model", model="another", stream=True)
raw("invalid_json", _CHAT, b'{"model": "x", "messages": [')
raw("invalid_json_of_completions", _COMPLETIONS, b'{"prompt": nothing}')
raw("not_an_object", _CHAT, b"[1, 2]")
raw("a_string", _CHAT, b'"hello"')
raw("not_utf8", _CHAT, b'{"model": "\xff\xfe"}')
raw("empty", _CHAT, b"")
raw("other_kind", _CHAT, b"model=x", kind="application/x-www-form-urlencoded")
raw("text_kind", _CHAT, b"{}", kind="text/plain")
raw("number_as_model", _CHAT, {"model": 7, "messages": []})
raw("unknown_path", "/nowhere", {"a": 1})
raw("post_to_models", "/models", {"a": 1})


@case
async def raw_no_messages(caller: Caller) -> Any:
    return await caller.post(_CHAT, {"model": caller.model})


@case
async def raw_no_prompt(caller: Caller) -> Any:
    return await caller.post(_COMPLETIONS, {"model": caller.model, "stream": True})


@case
async def raw_text_as_messages(caller: Caller) -> Any:
    return await caller.post(_CHAT, {"model": caller.model, "messages": "hi"})


@case
async def raw_text_as_number(caller: Caller) -> Any:
    body = {"model": caller.model, "messages": [{"role": "user", "content": "a"}], "n": "many"}
    return await caller.post(_CHAT, body)


@case
async def raw_no_model(caller: Caller) -> Any:
    return await caller.post(_COMPLETIONS, {"prompt": "Once", "max_tokens": 3, "temperature": 0})


@case
async def raw_half_a_pair(caller: Caller) -> Any:
    """Send the JSON that JavaScript's JSON.stringify makes of a string that is cut in an emoji."""
    text = '{"model": "%s", "prompt": "cut \\ud83d", "max_tokens": 3, "temperature": 0}'
    return await caller.post(_COMPLETIONS, (text % caller.model).encode())


@case
async def raw_not_a_number(caller: Caller) -> Any:
    text = '{"model": "%s", "prompt": "a", "max_tokens": 3, "presence_penalty": NaN}'
    return await caller.post(_COMPLETIONS, (text % caller.model).encode())


@case
async def raw_compressed(caller: Caller) -> Any:
    body = {"model": caller.model, "prompt": "Once", "max_tokens": 3, "temperature": 0}
    packed = gzip.compress(json.dumps(body).encode(), mtime=0)
    return await caller.post(_COMPLETIONS, packed, **{"Content-Encoding": "gzip"})


@case
async def raw_compressed_answer(caller: Caller) -> Any:
    body = {"model": caller.model, "prompt": "Once", "max_tokens": 3, "temperature": 0}
    return await caller.post(_COMPLETIONS, body, **{"Accept-Encoding": "gzip, br"})


@case
async def embeddings(caller: Caller) -> Any:
    return await caller.client.embeddings.create(model=caller.model, input="a text")


@case
async def embeddings_batch(caller: Caller) -> Any:
    return await caller.client.embeddings.create(
        model=caller.model, input=["a", "b", "日本"], encoding_format="float"
    )


@case
async def embeddings_unknown_model(caller: Caller) -> Any:
    return await caller.client.embeddings.create(model="another", input=["a"])


@case
async def transcription(caller: Caller) -> Any:
    sound = ("speech.wav", b"RIFF" + bytes(range(256)) * 20)
    return await caller.client.audio.transcriptions.create(model=caller.model, file=sound)


@case
async def transcription_unknown_model(caller: Caller) -> Any:
    sound = ("speech.wav", b"RIFF")
    return await caller.client.audio.transcriptions.create(model="another", file=sound)


@case
async def models(caller: Caller) -> Any:
    return [card async for card in caller.client.models.list()]


@case
async def head_of_models(caller: Caller) -> Any:
    return await caller.request("HEAD", "/models")


@case
async def get_of_chat(caller: Caller) -> Any:
    return await caller.client.get(_CHAT, cast_to=object)


@case
async def delete_of_chat(caller: Caller) -> Any:
    return await caller.client.delete(_CHAT, cast_to=object)


@case
async def options_of_chat(caller: Caller) -> Any:
    return await caller.request("OPTIONS", _CHAT)


@case
async def preflight_of_chat(caller: Caller) -> Any:
    fields = {"Origin": "http://a.example", "Access_Control_Request_Method": "POST"}
    return await caller.request("OPTIONS", _CHAT, **fields)


@case
async def preflight_of_models(caller: Caller) -> Any:
    fields = {"Origin": "http://a.example", "Access_Control_Request_Method": "GET"}
    return await caller.request("OPTIONS", "/models", **fields)


@case
async def unknown_path(caller: Caller) -> Any:
    return await caller.client.get("/nowhere/at/all", cast_to=object)


@case
async def organization(caller: Caller) -> Any:
    return await caller.other(organization="org-1", project="proj-1").chat()


@case
async def other_key(caller: Caller) -> Any:
    return await caller.other(api_key="another-key").chat()


@case
async def raw_answer(caller: Caller) -> Any:
    answer = await caller.client.completions.with_raw_response.create(
        model=caller.model, prompt="Once", max_tokens=3, temperature=0
    )
    return answer.status_code, answer.http_version, answer.parse().model_dump()


@case
async def stream_of_bytes(caller: Caller) -> Any:
    body = {"model": caller.model, "prompt": "Once", "max_tokens": 3, "temperature": 0}
    async with caller.client.completions.with_streaming_response.create(
        **body, stream=True
    ) as answer:
        return [line async for line in answer.iter_lines()]


@case
async def stream_helper(caller: Caller) -> Any:
    """Use the SDK's own accumulation of a stream's events."""
    async with caller.client.chat.completions.stream(
        model=caller.model,
        messages=[{"role": "user", "content": "Where are you?"}],
        temperature=0,
        max_tokens=20,
    ) as events:
        return [event.type async for event in events], (await events.get_final_completion())


@case
async def stream_left_early(caller: Caller) -> Any:
    events = await caller.complete(stream=True)
    async for event in events:
        await events.close()
        return event
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, openai.BaseModel):
        return [type(value).__name__, value.model_dump()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


async def observe(run: Case, caller: Caller, answers: list[Any]) -> dict[str, Any]:
    """Run a case. Returns the client's results; ``answers`` gets the status and headers of each
    response.
    """
    answers.clear()
    seen: dict[str, Any] = {"chunks": []}
    try:
        result = await run(caller)
        if isinstance(result, openai.AsyncStream):
            async for chunk in result:
                seen["chunks"].append(_plain(chunk))
        else:
            seen["result"] = _plain(result)
    except openai.OpenAIError as error:
        names = ("message", "status_code", "body", "code", "param", "type", "request_id")
        seen["error"] = type(error).__name__, {name: getattr(error, name, None) for name in names}
    return seen | {"answers": list(answers)}


@asynccontextmanager
async def calling(url: str, model: str, **options: Any) -> AsyncIterator[tuple[Caller, list[Any]]]:
    """Make a client that does not retry, and the list of the answers that it gets."""
    answers: list[Any] = []

    async def record(answer: Any) -> None:
        fields = {name: text for name, text in answer.headers.items() if name not in _UNCOMPARED}
        answers.append((answer.request.method, answer.status_code, fields))

    given = {"max_retries": 0, "api_key": "a-key", "timeout": 60.0, **options}
    async with (
        openai.DefaultAsyncHttpxClient(event_hooks={"response": [record]}) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", http_client=http, **given) as client,
    ):
        yield Caller(url, model, client, http), answers
