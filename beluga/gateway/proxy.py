# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The proxy: reads a request, places it on a worker, sends it there, and forwards the response.

Another worker is tried only while the client has not received a byte, and only if the request is
still executed once: the connection to the engine failed, or the engine responded that it is busy,
or the request only reads. An engine that aborts may continue to work on a request. So a prompt is
sent to another engine only if the first one's process has ended, and only once: a prompt that
crashes engines must not crash all of them. The client's status line waits for the first byte of the
engine's body, so an engine that dies in its prefill costs time but causes no error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from yarl import URL

from beluga.gateway.acceptor import is_own_shortage
from beluga.gateway.answers import Refusal, error_event
from beluga.gateway.bodies import Held
from beluga.gateway.director import Director, Placement
from beluga.gateway.engine import Engine
from beluga.gateway.headers import for_client, for_engine, retry_after_s
from beluga.gateway.health import FAILURES, read_whole, words_of
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import SLOW_SIZE, ParsedRequest, parse_request
from beluga.gateway.prompt_threads import in_prompt_thread
from beluga.gateway.relay import BrokenOffError, ClientGoneError, Source, relay
from beluga.gateway.remote import Remote
from beluga.gateway.responses import PATH as RESPONSES
from beluga.gateway.settings import Limits
from beluga.gateway.standing import client_of
from beluga.gateway.tokenizer import Tokenizer
from beluga.listening import plain_path

log = logging.getLogger(__name__)

COMPUTING = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
        "/pooling",
        "/classify",
        "/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/inference/v1/generate",
    )
)
"""Paths of requests that change nothing but caches. /v1/responses may call tools."""
_NEVER_SENT = (
    *(aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError),
    *(aiohttp.ClientConnectionResetError, aiohttp.InvalidURL),
)
_MAY_GO_ON = "the engine aborted, and may have executed the request, so it is not repeated: %s"
_BUSY = (429, 503)
_REFUSAL_SIZE_MAX = 1 << 20  # bytes of a busy engine's response
_BUSY_S = 0.1  # shortest time after which a busy engine gets the same request again
_REST_LOOK_S = 0.5  # interval at which a request that waits for a busy engine tries others
_SLOW_TO_TOKENIZE = 1 << 14  # bytes; a longer prompt is tokenized on a thread
_READS = ("GET", "HEAD", "OPTIONS")
_LARGE_SIZE = 1 << 20  # per body: parsing it takes several times its size
_LARGE_MAX = 2  # of these, the number parsed at a time
_GONE_LOOKS = 3  # checks of an engine that has aborted
_GONE_LOOK_S = 0.1


class _UnansweredError(Exception):
    """The engine gave no response that may be forwarded, and another engine may be tried."""

    def __init__(
        self,
        status: int,
        why: str,
        answer: web.Response | None = None,
        *,
        pause_s: float = 0.0,
        begun: bool = False,
    ) -> None:
        """``answer`` is a busy engine's response, for a client that no other engine serves, and
        ``pause_s`` the pause that it requested. ``begun``: the engine may have started to work on
        the request.
        """
        super().__init__(why)
        self.status = status
        self.answer = answer
        self.pause_s = pause_s
        self.begun = begun


class Proxy:
    """Handles clients' requests to engines."""

    def __init__(  # noqa: PLR0913  keyword-only
        self,
        *,
        director: Director,
        client: aiohttp.ClientSession,
        metrics: Metrics,
        limits: Limits,
        tokenizer: Tokenizer | None,
        remote: Remote,
    ) -> None:
        self._remote = remote
        self._director = director
        self._client = client
        self._metrics = metrics
        self._limits = limits
        self._tokenizer = tokenizer
        self._large = asyncio.Semaphore(_LARGE_MAX)
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.connect_s, sock_read=limits.stall_s
        )

    async def handle(self, request: web.Request, body: bytes, held: Held) -> web.StreamResponse:
        """Handle a request for an engine; ``held`` is the memory of its body. Raises Refusal."""
        first = arrived = time.perf_counter()
        parsed = await self._parsed(request, body)
        del body
        tried: set[int] = set()
        failures = deaths = 0
        busy: web.Response | None = None
        client = client_of(request.headers, request.remote)
        resting: dict[int, float] = {}  # end of the pause that each worker requested
        while True:
            try:
                if not await self._rested(parsed, resting, first + self._limits.queue_s):
                    raise Refusal(503, "every worker requested a longer pause")
                placement = await self._director.place(
                    parsed, tried, arrived, client=client, without=resting
                )
            except Refusal:
                if busy is None:
                    raise
                return busy
            try:
                return await self._attempt(request, parsed, placement, held, remote=not tried)
            except _UnansweredError as error:
                worker = placement.engine.worker.worker_id
                again = worker in tried
                tried.add(worker)
                log.warning("%s: %s", placement.engine.url, error)
                self._metrics.retried(placement.engine)
                busy = error.answer
                failures += busy is None
                if error.begun and request.method not in _READS:
                    deaths += 1
                    if deaths > 1 or not await self._may_begin_anew(parsed, placement.engine):
                        raise Refusal(error.status, _MAY_GO_ON % error) from None
                arrived = time.perf_counter()
                if error.pause_s:
                    resting[worker] = arrived + error.pause_s
                late = again and arrived - first > self._limits.queue_s
                if late or max(len(tried), failures) > self._limits.retries:
                    if busy is not None:
                        return busy
                    text = f"no worker responds; the last one tried: {error}"
                    raise Refusal(error.status, text, retry_after_s=1) from None

    async def _rested(self, parsed: ParsedRequest, resting: dict[int, float], until: float) -> bool:
        """Wait until a request may be sent to a worker: one that did not request a pause, or one
        whose pause has ended, which is then removed from ``resting``. The request is not in the
        queue meanwhile, so it blocks no other. Returns False if that takes too long. Raises
        Refusal.
        """
        while resting and not self._director.has_other(parsed, resting):
            worker, ends = min(resting.items(), key=lambda one: one[1])
            left = ends - time.perf_counter()
            if left <= 0:
                del resting[worker]
                return True
            if ends > until:
                return False
            await asyncio.sleep(min(left, _REST_LOOK_S))
        return True

    async def _attempt(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        placement: Placement,
        held: Held,
        *,
        remote: bool,
    ) -> web.StreamResponse:
        """Serve a request by the engine on which it was placed, after a remote prefill if that is
        allowed. Raises _UnansweredError.
        """
        async with placement:
            if remote:
                await self._remote.prefill(parsed, placement.choice)
            try:
                return await self._exchange(request, parsed, placement, held)
            except _UnansweredError:
                placement.answered("unanswered")
                raise

    async def _may_begin_anew(self, parsed: ParsedRequest, engine: Engine) -> bool:
        """Return whether a request that an engine has started can be sent to another one: it only
        computes, and the first engine's process has ended.
        """
        return parsed.path in COMPUTING and await _is_gone(engine.url)

    async def _parsed(self, request: web.Request, body: bytes) -> ParsedRequest:
        if request.method == "OPTIONS":  # a preflight of a browser, which any engine can serve
            return ParsedRequest(request.path, b"", odd=True)
        encoding = request.headers.get("Content-Encoding", "")
        parse = partial(
            parse_request,
            *(plain_path(request.rel_url.raw_path) or request.path, body),
            tokenizer=self._tokenizer,
            is_json=_is_json(request.content_type),
            encoding="" if encoding.lower() == "identity" else encoding[:40],
        )
        slow = SLOW_SIZE if self._tokenizer is None else _SLOW_TO_TOKENIZE
        if len(body) <= slow:
            return parse()
        if len(body) <= _LARGE_SIZE:
            return await in_prompt_thread(parse)
        async with self._large:
            return await in_prompt_thread(parse)

    async def _exchange(
        self, request: web.Request, parsed: ParsedRequest, placement: Placement, held: Held
    ) -> web.StreamResponse:
        """Send the request and forward the response. Raises _UnansweredError if no response has
        started.
        """
        engine = placement.engine
        headers = for_engine(request.headers)
        try:
            response = await self._client.request(
                request.method,
                URL(engine.url + _target(request), encoded=True),
                data=parsed.body or None,
                headers=headers,
                allow_redirects=False,
                timeout=self._timeout,
                skip_auto_headers=("User-Agent", "Content-Type"),
            )
        except FAILURES as error:
            if is_own_shortage(error):
                log.warning("no connection to %s can be opened: %s", engine.url, error)
                text = f"this router cannot open a connection: {words_of(error)}"
                raise Refusal(503, text, retry_after_s=1) from error
            if isinstance(error, ValueError):  # aiohttp rejects it
                raise Refusal(400, f"this request cannot be forwarded: {error}") from error
            begun = not isinstance(error, _NEVER_SENT)
            if begun:
                engine.broke_off(placement.client, words_of(error))
            else:
                engine.fail(words_of(error))
            raise _UnansweredError(502, words_of(error), begun=begun) from error
        async with response:
            if response.status in _BUSY:
                pause_s = retry_after_s(response.headers, self._limits.cool_down_max_s)
                pause_s = max(pause_s, _BUSY_S)
                engine.busy(placement.client, pause_s)
                why = f"it returned {response.status}"
                answer = await _whole(response, engine.url)
                raise _UnansweredError(response.status, why, answer, pause_s=pause_s)
            engine.answered(response.status)
            target = web.StreamResponse(
                status=response.status,
                reason=response.reason,
                headers=for_client(response.headers, engine.url),
            )
            if response.content_length is not None:
                target.content_length = response.content_length
            with Source(response, self._limits.stall_s) as source:
                try:
                    first = await source.next()
                    if parsed.path == RESPONSES and response.status == HTTPStatus.OK:
                        first += await _until_data(source, first)
                        self._director.responses.made(first, engine.worker.worker_id)
                except BrokenOffError as error:
                    engine.broke_off(placement.client, str(error))
                    raise _UnansweredError(502, str(error), begun=True) from error
                placement.first_token()
                parsed.drop_body()  # the body will not be sent again
                held.release()
                await self._pass_on(request, source, first, target, placement)
            return target

    async def _pass_on(
        self,
        request: web.Request,
        source: Source,
        first: bytes,
        target: web.StreamResponse,
        placement: Placement,
    ) -> None:
        try:
            await target.prepare(request)
            await relay(source, first, target, placement.tokens)
            await target.write_eof()
            placement.answered(target.status)
        except BrokenOffError as error:
            placement.answered("broken")
            placement.engine.broke_off(placement.client, f"it aborted: {error}")
            log.warning("%s aborted: %s", placement.engine.url, error)
            await _end_broken(request, source, target, error)
        except (ClientGoneError, ConnectionError):
            pass  # leaving closes the engine's connection, which cancels its work


def _is_json(kind: str) -> bool:
    """Return whether a body of this content type is JSON: vLLM accepts ``application/json`` and
    ``application/*+json``. A client without a content type sends octets.
    """
    known = ("application/json", "application/octet-stream")
    return kind in known or (kind.startswith("application/") and kind.endswith("+json"))


def _target(request: web.Request) -> str:
    """Return the path and query for an engine, as written by the client, but without a trailing
    slash, which frameworks redirect. A client may also send an absolute URL ("POST
    http://host/v1/..."), whose host is not the engine's.
    """
    target = request.raw_path
    if not target.startswith("/"):
        target = request.rel_url.raw_path_qs
    path, mark, query = target.partition("?")
    return f"{path.rstrip('/')}{mark}{query}"


async def _until_data(source: Source, first: bytes) -> bytes:
    """Return the continuation of a stream's first piece, up to the first event's data."""
    more = b""
    while source.has_events and b"data:" not in first + more:
        piece = await source.next()
        if not piece:
            break
        more += piece
    return more


async def _is_gone(url: str) -> bool:
    """Return whether an engine's process has ended: its port refuses connections. A terminating
    process may listen a moment longer than its connections last.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for look in range(_GONE_LOOKS):
        await asyncio.sleep(_GONE_LOOK_S * look)
        try:
            connected = asyncio.open_connection(parts.hostname, port)
            _, writer = await asyncio.wait_for(connected, _GONE_LOOK_S)
        except ConnectionRefusedError:
            return True
        except (OSError, asyncio.TimeoutError):
            continue
        writer.close()
    return False


async def _whole(response: aiohttp.ClientResponse, url: str) -> web.Response | None:
    """Return an engine's complete response for the client, or None if it aborts."""
    try:
        body = await read_whole(response, _REFUSAL_SIZE_MAX)
    except FAILURES:
        return None
    headers = for_client(response.headers, url)
    return web.Response(status=response.status, reason=response.reason, body=body, headers=headers)


async def _end_broken(
    request: web.Request, source: Source, target: web.StreamResponse, error: BrokenOffError
) -> None:
    """Notify the client with an event in an event stream, otherwise by closing the connection."""
    if source.has_events:
        try:
            await target.write(error_event(502, f"the engine aborted: {error}"))
            await target.write_eof()
        except (ConnectionError, RuntimeError):
            log.debug("the client has disconnected, too")
    elif request.transport is not None:
        request.transport.abort()
