# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A fake engine without a model, which implements the real protocol and can fail in chosen ways.

It responds as vLLM does: chat and completions, whole or as a stream of events that ends with
``[DONE]``, errors in its form, ``/health``, ``/v1/models``, ``/tokenize``, ``/metrics``. The test
sets the faults on the object, which runs on the test's own event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

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
        found = [
            b"data: %s\n\n"
            % json.dumps(
                {"model": body.get("model"), "choices": [{"index": 0, "text": word}]},
                ensure_ascii=False,
            ).encode()
            for word in self.words
        ]
        return [*found, b"data: [DONE]\n\n"]
