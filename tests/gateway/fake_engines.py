# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines without a model, for the gateway's tests: one that can fail in chosen ways, one that
answers clients of OpenAI's API as ``vllm serve`` does, and the publisher of an engine's KV events.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

# ---- An engine that can fail


WORDS = ("Grüße", " aus", " 日本", " 🐋", " ok")


@dataclasses.dataclass
class Faults:
    """The engine's faults; none by default."""

    status: int = 0  # sent instead of an answer
    retry_after: str | None = None  # sent with that status
    limited: frozenset[str] = frozenset()  # clients, by Authorization, that get 429
    poison: str = ""  # a prompt with which the engine cuts the connection
    healthy: bool = True
    drop_after: int | None = None  # bytes of the stream after which the connection is cut
    sick: bool = False  # /health fails, too
    drop_first: int = 0  # number of requests whose connection is cut before any byte
    split: bool = False  # every byte of the stream is a separate chunk
    hold: asyncio.Event | None = None  # nothing is sent after the first event until it is set
    hold_first: asyncio.Event | None = None  # even the first event waits for it
    pause_s: float = 0.0  # between events


class FakeEngine:
    """A context manager that runs the engine at ``url``."""

    root = ""  # of its first model, as listed

    def __init__(self, *models: str, words: tuple[str, ...] = WORDS) -> None:
        self.models = models or ("fake",)
        self.words = words
        self.faults = Faults()
        self.seen: list[dict[str, Any]] = []  # bodies of chat and completion requests
        self.headers: list[dict[str, str]] = []
        self.cancelled = 0
        self.under_way = 0
        self.metrics: str | None = "vllm:num_requests_running 0\n"  # None: there is no /metrics
        self.scrapes = 0  # how often /metrics was requested
        self.made: list[str] = []  # stored responses, which only this engine has
        self.template = ""  # text in front of a conversation
        self.tokenize_status = 200
        self.tokenize_calls = 0
        self.tokenized: bytes | None = None  # the body of its answer; empty: the connection is cut
        self.listed: bytes | None = None  # the body of /v1/models
        self.drop_listed = False  # whether requests for batches are cut
        self.hold_response: asyncio.Event | None = None  # set when a response is begun: it hangs
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> FakeEngine:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._scraped),
                web.post("/v1/chat/completions", self._generate),
                web.post("/v1/completions", self._generate),
                web.post("/v1/embeddings", self._embed),
                web.post("/v1/responses", self._respond),
                web.get("/v1/responses/{name}", self._response),
                web.post("/v1/responses/{name}/cancel", self._response),
                web.post("/tokenize", self._tokenize),
                web.get("/v1/batches", self._batches),
            ]
        )
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=0.1,
            max_field_size=1 << 17,
            max_headers=512,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner
        await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.faults.healthy else 503)

    async def _models(self, _: web.Request) -> web.Response:
        if self.listed is not None:
            return web.Response(body=self.listed)
        cards = [{"id": name, "object": "model", "owned_by": "vllm"} for name in self.models]
        if self.root:
            cards[0]["root"] = self.root
        return web.json_response({"object": "list", "data": cards})

    async def _batches(self, request: web.Request) -> web.Response:
        if self.drop_listed:
            assert request.transport
            request.transport.abort()
        return web.Response(text="none")

    async def _scraped(self, request: web.Request) -> web.Response:
        self.scrapes += 1
        if self.metrics is None:
            raise web.HTTPNotFound
        answer = web.Response(body=self.metrics.encode(errors="surrogateescape"))
        if "gzip" in request.headers.get("Accept-Encoding", ""):  # as prometheus_client does
            answer.enable_compression(web.ContentCoding.gzip)
        return answer

    async def _embed(self, request: web.Request) -> web.Response:
        result = await request.json()
        return web.json_response({"object": "list", "data": [], "model": result["model"]})

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        result = await request.json()
        if self.hold_response is not None:
            self.hold_response.set()
            await asyncio.Event().wait()
        before = result.get("previous_response_id")
        if before is not None and before not in self.made:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        self.made.append(f"resp_{self._port}-{len(self.made)}")
        made = {"id": self.made[-1], "object": "response", "at": self.url}
        if not result.get("stream"):
            return web.json_response(made)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"event: response.created\n")
        await asyncio.sleep(0)  # the line may come in a separate chunk
        event = json.dumps({"type": "response.created", "response": made})
        await answer.write(b"data: " + event.encode() + b"\n\n")
        return answer

    async def _response(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.made:
            return web.json_response({"error": {"message": f"{name} not found"}}, status=404)
        kind = "cancelled" if request.method == "POST" else "completed"
        return web.json_response({"id": name, "status": kind, "at": self.url})

    async def _tokenize(self, request: web.Request) -> web.Response:
        result = await request.json()
        self.tokenize_calls += 1
        if self.tokenized is not None:
            if not self.tokenized:
                assert request.transport
                request.transport.abort()
            return web.Response(body=self.tokenized)
        messages = result.get("messages") or [{"content": result.get("prompt")}]
        text = "".join(message["content"] for message in messages)
        text = self.template + text if "messages" in result else text
        answer = {"tokens": list(text.encode()), "at": self.url}
        return web.json_response(answer, status=self.tokenize_status)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        result = await request.json()
        self.seen.append(result)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        faults = self.faults
        if faults.drop_first > 0:
            faults.drop_first -= 1
            assert request.transport
            request.transport.abort()
            return web.Response()
        if faults.poison and result.get("prompt") == faults.poison:
            assert request.transport
            request.transport.abort()
            return web.Response()
        limited = request.headers.get("Authorization", "") in faults.limited
        if status := 429 if limited else faults.status:
            headers = {"Retry-After": faults.retry_after} if faults.retry_after else {}
            error = {"message": "no", "type": "Fault", "param": None, "code": status}
            return web.json_response({"error": error}, status=status, headers=headers)
        self.under_way += 1
        try:
            if result.get("stream"):
                return await self._stream(request, result)
            if faults.hold_first:
                await faults.hold_first.wait()
            text = "".join(self.words)
            choice = {"index": 0, "text": text, "message": {"content": text}}
            return web.json_response({"model": result.get("model"), "choices": [choice]})
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        target = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await target.prepare(request)  # vLLM also sends the headers long before the first token
        sent = 0
        async for event in self._events(body):
            for part in [bytes([byte]) for byte in event] if self.faults.split else [event]:
                left = len(part)
                if self.faults.drop_after is not None:
                    left = min(left, self.faults.drop_after - sent)
                if left:
                    await target.write(part[:left])
                sent += left
                if sent == self.faults.drop_after:
                    self.faults.healthy = not self.faults.sick
                    await asyncio.sleep(0.01)  # the data is sent meanwhile
                    assert request.transport
                    request.transport.abort()
                    return target
                if self.faults.split:
                    await asyncio.sleep(0)
        await target.write_eof()
        return target

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        for number, event in enumerate(self.events(body)):
            hold = self.faults.hold if number else self.faults.hold_first
            if hold:
                await hold.wait()
            if number and self.faults.pause_s:
                await asyncio.sleep(self.faults.pause_s)
            yield event

    def events(self, body: dict[str, Any]) -> list[bytes]:
        """Return all bytes of a stream, event by event."""
        events = [
            b"data: %s\n\n"
            % json.dumps(
                {"model": body.get("model"), "choices": [{"index": 0, "text": word}]},
                ensure_ascii=False,
            ).encode()
            for word in self.words
        ]
        return [*events, b"data: [DONE]\n\n"]


# ---- An engine for OpenAI's SDK


MODEL = "stand-in"
CONTEXT = 4096  # in tokens; here each word is one token
KEY = "a-key"
_ANSWER = ["Grüße", "aus", "日本", "🐋", "of", "STOP", "and", "all", "that", "comes", "behind"]
_ANSWER_TOKENS = len(_ANSWER)
_SENT_BACK = ("authorization", "openai-organization", "openai-project", "openai-beta", "x-own")


class ApiError(Exception):
    """An error of the API, as an answer."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"message": message, "type": kind, "param": param, "code": status}


def invalid(where: str, what: str, message: str, given: Any = None) -> ApiError:
    """Return the error of a request that does not fit the schema."""
    detail = {"type": what, "loc": f"body.{where}".strip("."), "msg": message, "input": given}
    text = f"1 validation error:\n  {detail}"
    return ApiError(400, text, "Bad Request", detail["loc"])


class OpenAIEngine:
    """A context manager that runs the engine at ``url``, with ``--enable-request-id-headers`` (but
    it generates no ids, so that two responses are equal).

    A request whose ``user`` is ``hold`` is answered by its first event, or by nothing if it is not
    a stream, until ``release`` is set. One whose ``user`` is ``break`` ends in an error in the
    stream. ``busy`` answers are sent before all others. With ``guarded`` it requests KEY.
    """

    def __init__(self, model: str = MODEL, *, guarded: bool = False) -> None:
        self.under_way = 0
        self.cancelled = 0
        self.count = 0  # number of requests so far
        self.release = asyncio.Event()
        self.busy: list[tuple[int, dict[str, str]]] = []
        self.url = ""
        self._model = model
        self._guarded = guarded
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> OpenAIEngine:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._answer])
        for path, make in (
            ("chat/completions", self._chat),
            ("completions", self._completions),
            ("embeddings", self._embeddings),
            ("responses", self._responses),
        ):
            app.router.add_post(f"/v1/{path}", self._generating(make))
        app.router.add_post("/v1/audio/transcriptions", self._transcribe)
        app.router.add_get("/v1/models", self._models, allow_head=False)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._health)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1, auto_decompress=False
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner
        await self._runner.cleanup()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answer every error as vLLM does."""
        given = request.headers.get("Authorization")
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(text="OK", headers=_CORS | {"Vary": "Origin"})
        if self._guarded and request.path.startswith("/v1") and given != f"Bearer {KEY}":
            return _json({"error": "Unauthorized"}, 401, request)
        try:
            made: web.StreamResponse = await handler(request)
            return made
        except ApiError as error:
            return _json({"error": error.body}, error.status, request)
        except web.HTTPException as error:
            phrase = HTTPStatus(error.status).phrase
            body = ApiError(error.status, phrase, phrase).body
            return _json({"error": body}, error.status, request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "created": 1, "owned_by": "vllm",
                "root": self._model, "parent": None, "max_model_len": CONTEXT}  # fmt: skip
        return _json({"object": "list", "data": [card]}, 200, request)

    async def _transcribe(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.count += 1
        if form.get("model") != self._model:
            raise _unknown(form.get("model"))
        sound = form["file"]
        assert isinstance(sound, web.FileField)
        size = len(sound.file.read())
        return _json({"text": f"{sound.filename} has {size} bytes", "usage": None}, 200, request)

    def _generating(
        self, make: Callable[[dict[str, Any], str], list[bytes] | dict[str, Any]]
    ) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.count += 1
            self.under_way += 1
            try:
                body = await request.read()
                if self.busy:
                    status, headers = self.busy.pop(0)
                    text = HTTPStatus(status).phrase
                    error = ApiError(status, f"{text}: come again", text).body
                    return _json({"error": error}, status, request, headers)
                requested = _read(request, body, self._model)
                made = make(requested, _mark(request, body))
                return await self._send(request, requested, made)
            except (asyncio.CancelledError, ConnectionError):
                self.cancelled += 1
                raise
            finally:
                self.under_way -= 1

        return handle

    async def _send(
        self, request: web.Request, requested: dict[str, Any], made: list[bytes] | dict[str, Any]
    ) -> web.StreamResponse:
        held = requested.get("user") == "hold"
        if isinstance(made, dict):
            if held:
                await self.release.wait()
            return _json(made, 200, request)
        headers = {"Content-Type": "text/event-stream; charset=utf-8", **_common(request)}
        target = web.StreamResponse(headers=headers)
        await target.prepare(request)
        if requested.get("user") == "break":
            error = ApiError(500, "the engine has failed", "InternalServerError").body
            made[2:] = [_event({"error": error}), b"data: [DONE]\n\n"]
        for event in made:
            await target.write(event)
            if held:
                await self.release.wait()
            await asyncio.sleep(0)
        await target.write_eof()
        return target

    def _chat(self, requested: dict[str, Any], mark: str) -> list[bytes] | dict[str, Any]:
        messages = _field(requested, "messages", list)
        prompt = _length(messages)
        head = _head("chatcmpl", "chat.completion", requested, mark)
        if requested.get("stream"):
            head["object"] += ".chunk"
            pieces: list[dict[str, Any]] = []
            for index in range(requested.get("n") or 1):
                pieces += _chat_pieces(requested, index)
            return _chunks(requested, head, pieces, prompt)
        choices = [_chat_choice(requested, index) for index in range(requested.get("n") or 1)]
        return {**head, "choices": choices, "usage": _usage(prompt, len(choices))}

    def _completions(self, requested: dict[str, Any], mark: str) -> list[bytes] | dict[str, Any]:
        given = _field(requested, "prompt", (str, list))
        prompts = (
            given if isinstance(given, list) and given and type(given[0]) is not int else [given]
        )
        head = _head("cmpl", "text_completion", requested, mark)
        pieces = []
        count = len(prompts) * (requested.get("n") or 1)
        for index in range(count):
            words, why = _words(requested, index)
            for number, word in enumerate(words):
                last = number == len(words) - 1
                logprobs = _plain_logprobs(requested, [word])
                pieces.append(
                    {"index": index, "text": word, "logprobs": logprobs,
                     "finish_reason": why if last else None, "stop_reason": None}
                )  # fmt: skip
        length = sum(_length(prompt) for prompt in prompts)
        if requested.get("stream"):
            return _chunks(requested, head, pieces, length)
        choices = []
        for index in range(count):
            words, why = _words(requested, index)
            choices.append(
                {"index": index, "text": "".join(words), "finish_reason": why, "stop_reason": None,
                 "logprobs": _plain_logprobs(requested, words)}
            )  # fmt: skip
        return {**head, "choices": choices, "usage": _usage(length, count)}

    def _embeddings(self, requested: dict[str, Any], mark: str) -> dict[str, Any]:
        given = _field(requested, "input", (str, list))
        texts = given if isinstance(given, list) and type(given[0]) is not int else [given]
        data = []
        for index, text in enumerate(texts):
            vector = [(zlib.crc32(f"{text} {n}".encode()) % 1000) / 8 for n in range(8)]
            packed: Any = vector
            if requested.get("encoding_format") == "base64":
                packed = base64.b64encode(struct.pack("<8f", *vector)).decode()
            data.append({"index": index, "object": "embedding", "embedding": packed})
        head = {
            "id": f"embd-{mark}",
            "object": "list",
            "created": 1,
            "model": requested.get("model"),
        }
        return {**head, "data": data, "usage": {"prompt_tokens": len(texts), "total_tokens": 1}}

    def _responses(self, requested: dict[str, Any], mark: str) -> list[bytes] | dict[str, Any]:
        _length(_field(requested, "input", (str, list)))
        words, _ = _words(requested, 0)
        text = {"type": "output_text", "text": "".join(words), "annotations": [], "logprobs": None}
        item = {"id": f"msg_{mark}", "type": "message", "role": "assistant", "content": [text],
                "status": "completed"}  # fmt: skip
        head = {"id": f"resp_{mark}", "object": "response", "created_at": 1,
                "model": requested.get("model"), "status": "completed", "output": [item],
                "parallel_tool_calls": True, "tool_choice": "auto",
                "tools": requested.get("tools") or []}  # fmt: skip
        if not requested.get("stream"):
            return head
        begun = {**head, "status": "in_progress", "output": []}
        position = {"item_id": item["id"], "output_index": 0}
        inside = {**position, "content_index": 0}
        listed: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            {"type": "response.output_item.added", "output_index": 0,
             "item": {**item, "content": [], "status": "in_progress"}},
            {"type": "response.content_part.added", **inside, "part": {**text, "text": ""}},
            *({"type": "response.output_text.delta", **inside, "delta": word, "logprobs": []}
              for word in words),
            {"type": "response.output_text.done", **inside, "text": text["text"], "logprobs": []},
            {"type": "response.content_part.done", **inside, "part": text},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": head},
        ]  # fmt: skip
        return [
            b"event: %s\n%s" % (item["type"].encode(), _event({**item, "sequence_number": number}))
            for number, item in enumerate(listed)
        ]


_CORS = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Methods": "DELETE, GET, POST"}


def _common(request: web.Request) -> dict[str, str]:
    """Return the headers of every answer."""
    headers = {"Server": "uvicorn"}
    if "X-Request-Id" in request.headers:
        headers["X-Request-Id"] = request.headers["X-Request-Id"]
    if "Origin" in request.headers:
        headers["Access-Control-Allow-Origin"] = "*"
    return headers


def _json(
    value: Any, status: int, request: web.Request, headers: dict[str, str] | None = None
) -> web.Response:
    text = json.dumps(value, ensure_ascii=False).encode()
    kind = {"Content-Type": "application/json"}
    return web.Response(
        status=status, body=text, headers={**kind, **_common(request), **(headers or {})}
    )


def _event(value: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps(value, ensure_ascii=False).encode()


def _mark(request: web.Request, body: bytes) -> str:
    listed = [f"{name}={request.headers.get(name)}" for name in _SENT_BACK]
    return f"{zlib.crc32(body + request.query_string.encode() + repr(listed).encode()):08x}"


def _read(request: web.Request, body: bytes, served: str) -> dict[str, Any]:
    """Return a body's fields, or raise the error of one that is invalid."""
    if request.content_type != "application/json":
        text = "Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, f"1 validation error:\n  {text}", "Bad Request")
    if not body:
        raise invalid("", "missing", "Field required")
    try:
        result = json.loads(body)
    except UnicodeDecodeError:
        raise ApiError(400, "There was an error parsing the body", "Bad Request") from None
    except json.JSONDecodeError as error:
        raise invalid(str(error.pos), "json_invalid", "JSON decode error", {}) from None
    if not isinstance(result, dict):
        raise invalid("", "model_attributes_type", "Input should be a valid dictionary", result)
    model = result.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid("model", "string_type", "Input should be a valid string", model)
    for name in ("n", "max_tokens", "seed"):
        if not isinstance(result.get(name), int | None):
            raise invalid(name, "int_parsing", "Input should be a valid integer", result[name])
    if not -2.0 <= float(result.get("presence_penalty") or 0) <= 2.0:
        text = "presence_penalty must be in [-2, 2], got " + str(result["presence_penalty"])
        raise ApiError(400, text, param="presence_penalty")
    if result.get("stream_options") and not result.get("stream"):
        text = "Stream options can only be defined when `stream=True`."
        raise invalid("", "value_error", text, {})
    if model and model != served:
        raise _unknown(model)
    return result


def _unknown(model: Any) -> ApiError:
    return ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")


def _field(requested: dict[str, Any], name: str, kind: Any) -> Any:
    if name not in requested:
        raise invalid(name, "missing", "Field required", "{...}")
    if not isinstance(requested[name], kind):
        raise invalid(name, "list_type", "Input should be a valid list", requested[name])
    return requested[name]


def _length(prompt: Any) -> int:
    """Return a prompt's tokens. Raises the error of one that is too long."""
    ids = isinstance(prompt, list) and prompt and type(prompt[0]) is int
    count = len(prompt) if ids else len(json.dumps(prompt).split(" "))
    if count + _ANSWER_TOKENS > CONTEXT:
        text = f"This model's maximum context length is {CONTEXT} tokens. However, you requested "
        text += f"{_ANSWER_TOKENS} output tokens and your prompt contains {count} input tokens."
        raise ApiError(400, text, param="input_tokens")
    return count


def _head(kind: str, what: str, requested: dict[str, Any], mark: str) -> dict[str, Any]:
    return {"id": f"{kind}-{mark}", "object": what, "created": 1,
            "model": requested.get("model") or MODEL, "system_fingerprint": mark}  # fmt: skip


def _usage(prompt: int, answer_count: int) -> dict[str, Any]:
    made = answer_count * _ANSWER_TOKENS
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
            "prompt_tokens_details": None}  # fmt: skip


def _words(requested: dict[str, Any], index: int) -> tuple[list[str], str]:
    """Return the words of an answer and why it ends."""
    words = [f" {word}" for word in (*_ANSWER, str(requested.get("seed", 0)), str(index))]
    if (requested.get("response_format") or {}).get("type") in ("json_object", "json_schema"):
        words = ['{"', "city", '":', ' "', "Zürich", '"}']
    stops = requested.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        for count, word in enumerate(words):
            if stop in word:
                return words[:count], "stop"
    limit = requested.get("max_tokens") or requested.get("max_completion_tokens") or len(words)
    return words[:limit], "length" if limit < len(words) else "stop"


def _calls(requested: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of an answer: each tool, or the first one."""
    tools = requested.get("tools") or []
    if requested.get("tool_choice") == "none":
        return []
    if requested.get("parallel_tool_calls") is False:
        tools = tools[:1]
    return [
        {"id": f"call-{number}", "type": "function",
         "function": {"name": tool["function"]["name"], "arguments": '{"city": "Zürich"}'}}
        for number, tool in enumerate(tools)
    ]  # fmt: skip


def _chat_logprobs(requested: dict[str, Any], words: list[str]) -> dict[str, Any] | None:
    if not requested.get("logprobs"):
        return None

    def token(word: str, rank: int) -> dict[str, Any]:
        return {"token": word, "logprob": -0.1 * (rank + 1), "bytes": list(word.encode())}

    top = requested.get("top_logprobs") or 0
    return {"content": [{**token(word, 0), "top_logprobs": [token(word, n) for n in range(top)]}
                        for word in words]}  # fmt: skip


def _plain_logprobs(requested: dict[str, Any], words: list[str]) -> dict[str, Any] | None:
    if requested.get("logprobs") is None:
        return None
    return {"tokens": words, "token_logprobs": [-0.1] * len(words), "text_offset": [0] * len(words),
            "top_logprobs": [{word: -0.1} for word in words]}  # fmt: skip


def _chat_choice(requested: dict[str, Any], index: int) -> dict[str, Any]:
    words, why = _words(requested, index)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(words), "refusal": None,
                               "tool_calls": [], "reasoning": None}  # fmt: skip
    if calls := _calls(requested):
        message |= {"content": None, "tool_calls": calls}
        why = "tool_calls"
    return {"index": index, "message": message, "logprobs": _chat_logprobs(requested, words),
            "finish_reason": why, "stop_reason": None}  # fmt: skip


def _chat_pieces(requested: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    words, why = _words(requested, index)

    def piece(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    yield piece({"role": "assistant", "content": ""})
    calls = _calls(requested)
    for number, call in enumerate(calls):
        function = call["function"]
        begun = {**call, "index": number, "function": {**function, "arguments": ""}}
        yield piece({"tool_calls": [begun]})
        for part in (function["arguments"][:4], function["arguments"][4:]):
            yield piece({"tool_calls": [{"index": number, "function": {"arguments": part}}]})
    for word in () if calls else words:
        yield piece({"content": word}, logprobs=_chat_logprobs(requested, [word]))
    yield piece({}, finish_reason="tool_calls" if calls else why, stop_reason=None)


def _chunks(
    requested: dict[str, Any], head: dict[str, Any], pieces: list[dict[str, Any]], prompt: int
) -> list[bytes]:
    options = requested.get("stream_options") or {}
    often = {"usage": _usage(prompt, 1)} if options.get("continuous_usage_stats") else {}
    events = [_event({**head, "choices": [piece], **often}) for piece in pieces]
    if options.get("include_usage"):
        events.append(
            _event({**head, "choices": [], "usage": _usage(prompt, requested.get("n") or 1)})
        )
    return [*events, b"data: [DONE]\n\n"]


# ---- KV events


class Announcer:
    """An engine's side of KV events: it publishes, and replays on request."""

    def __init__(self, folder: Path) -> None:
        zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
        self._context = zmq.Context()
        self.events, self.replay = f"ipc://{folder}/e", f"ipc://{folder}/r"
        self._live = self._context.socket(zmq.XPUB)
        self._live.bind(self.events)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay)
        self._sent: list[list[bytes]] = []
        self.replays = 0
        self.block_size = 16

    def subscribed(self) -> bool:
        return bool(self._live.poll(0))

    def stored(self, tokens: list[int], first_name: int, *, live: bool = True) -> None:
        count = len(tokens) // self.block_size
        event = {
            "type": "BlockStored",
            "block_hashes": list(range(first_name, first_name + count)),
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": self.block_size,
            "lora_id": None,
            "medium": "GPU",
        }
        self.publish([event], live=live)

    def publish(self, events: object, *, live: bool = True) -> None:
        """Send any events, including invalid ones."""
        import msgspec

        number = len(self._sent).to_bytes(8, "big")
        frames = [b"", number, msgspec.msgpack.encode([time.time(), events, None])]
        self._sent.append(frames)
        if live:
            self._live.send_multipart(frames)

    def answer(self) -> None:
        """Serve requests for replays."""
        while self._router.poll(0):
            who, _, first = self._router.recv_multipart()
            self.replays += 1
            for _, number, payload in self._sent[int.from_bytes(first, "big") :]:
                self._router.send_multipart([who, b"", number, payload])
            self._router.send_multipart([who, b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._context.destroy(linger=0)
