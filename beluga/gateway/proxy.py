# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The proxy: reads a request, places it on a worker, sends it there, and forwards the response.

The client's status line waits for the first byte of the engine's body, so an engine that dies in
its prefill costs time but causes no error: ``attempts.py`` has the rule for another one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from types import TracebackType

import aiohttp
from aiohttp import web
from yarl import URL

from beluga.gateway.attempts import Attempts, UnansweredError
from beluga.gateway.director import Director, Placement
from beluga.gateway.engine import client_of
from beluga.gateway.engine_client import EngineClient
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import (
    RESPONSES,
    SLOW_SIZE,
    ParsedRequest,
    in_prompt_thread,
    parse_request,
)
from beluga.gateway.protocol import (
    FAILURES,
    Refusal,
    error_event,
    for_client,
    for_engine,
    read_whole,
    retry_after_s,
    words_of,
)
from beluga.gateway.remote import Remote
from beluga.gateway.settings import Limits
from beluga.gateway.tokenizers import Tokenizers
from beluga.http_server import connection_of, is_own_shortage
from beluga.listening import plain_path

log = logging.getLogger(__name__)


# ---- The relay

EVENT_STREAM = "text/event-stream"
_DATA = b"\ndata:"
_DONE = b"\ndata: [DONE]"

HELD_SIZE_MAX = 1 << 20
"""Largest buffered part of a line, in bytes. A longer line is forwarded in parts."""


class BrokenOffError(Exception):
    """The engine failed during its response."""


class ClientGoneError(Exception):
    """The client has disconnected."""


class Lines:
    """Splits chunks of an event stream after their last line end.

    The start of an unfinished line is buffered until the rest arrives. No client could use it
    earlier, and if the engine dies within a line, the client has received whole lines, which an
    error event can follow. Bytes are never decoded, so characters may be split between chunks.
    """

    def __init__(self) -> None:
        self._held = b""

    def push(self, chunk: bytes) -> bytes:
        """Add a chunk. Returns what can be forwarded now."""
        if not self._held and chunk.endswith(b"\n"):
            return chunk
        cut = chunk.rfind(b"\n") + 1
        if cut == len(chunk):
            whole, self._held = self._held + chunk, b""
        elif cut:
            whole, self._held = self._held + chunk[:cut], chunk[cut:]
        else:
            whole, self._held = b"", self._held + chunk
        if len(self._held) > HELD_SIZE_MAX:
            whole, self._held = whole + self._held, b""
        return whole

    @property
    def holds(self) -> bool:
        """Whether the start of a line is buffered."""
        return bool(self._held)

    def remainder(self) -> bytes:
        """Return the remainder at the end of a complete response."""
        held, self._held = self._held, b""
        return held


class EngineResponse:
    """An engine's response in pieces that can be forwarded; a context manager.

    An engine that sends nothing for ``stall_s`` seconds while the client waits has stalled. aiohttp
    would set a new timer for each piece; here one timer checks the time of the last piece.
    """

    def __init__(self, response: aiohttp.ClientResponse, stall_s: float) -> None:
        self.has_events = response.content_type == EVENT_STREAM
        self._response = response
        self._content = response.content
        self._lines = Lines()
        self._stall_s = stall_s
        self._since: float | None = None  # start of the wait for the engine
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> EngineResponse:
        connection = self._response.connection
        if connection is not None and connection.protocol is not None:
            connection.protocol.read_timeout = None
            connection.protocol.start_timeout()  # without a timeout, this ends the old timer
            self._look_in(self._stall_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def next(self) -> bytes:
        """Return the next piece; an empty one is the end. Raises BrokenOffError."""
        while True:
            self._since = time.monotonic()
            try:
                chunk = await self._content.readany()
            except FAILURES as error:
                raise BrokenOffError(words_of(error)) from error
            finally:
                self._since = None
            if not chunk:
                return self._lines.remainder()
            if not self.has_events:
                return chunk
            if whole := self._lines.push(chunk):
                return whole

    @property
    def ended(self) -> bool:
        """Whether the last returned piece is the final one."""
        return self._content.at_eof() and not self._lines.holds

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """End the response if the engine has stalled, otherwise check again when it might have."""
        silent_s = 0.0 if self._since is None else time.monotonic() - self._since
        if silent_s < self._stall_s:
            self._look_in(self._stall_s - silent_s)
        else:
            stalled = aiohttp.SocketTimeoutError(f"nothing came for {self._stall_s:g} s")
            self._content.set_exception(stalled)
            self._response.close()


async def relay(
    source: EngineResponse, first: bytes, target: web.StreamResponse, tokens: Callable[[int], None]
) -> None:
    """Forward a response whose first piece has been read. The caller ends the response, unless the
    end was sent with the last piece, which saves a packet.

    ``tokens`` gets the number of data events in each piece; an engine sends about one per token.
    Raises BrokenOffError or ClientGoneError.
    """
    piece = first
    while piece:
        try:
            await (target.write_eof(piece) if source.ended else target.write(piece))
        except (ConnectionError, RuntimeError) as error:  # "Cannot write to closing transport"
            raise ClientGoneError(words_of(error)) from error
        if source.has_events:
            lines = b"\n" + piece  # JSON has no line ends, so "data:" in a text does not count
            tokens(lines.count(_DATA) - lines.count(_DONE))
        piece = await source.next()


# ---- The proxy


_NEVER_SENT = (
    *(aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError),
    *(aiohttp.ClientConnectionResetError, aiohttp.InvalidURL),
)
_BUSY = (429, 503)
_REFUSAL_SIZE_MAX = 1 << 20  # bytes of a busy engine's response
_BUSY_S = 0.1  # shortest time after which a busy engine gets the same request again
_PAUSE_LOOK_S = 0.5  # interval at which a request that waits for a busy engine tries others
_SLOW_TO_TOKENIZE = 1 << 14  # bytes; a longer prompt is tokenized on a thread
_LARGE_SIZE = 1 << 20  # per body: parsing it takes several times its size
_LARGE_MAX = 2  # of these, the number parsed at a time


class Proxy:
    """Handles clients' requests to engines."""

    def __init__(  # noqa: PLR0913  keyword-only
        self,
        *,
        director: Director,
        client: EngineClient,
        metrics: Metrics,
        limits: Limits,
        tokenizers: Tokenizers,
        remote: Remote,
    ) -> None:
        self._remote = remote
        self._director = director
        self._client = client
        self._metrics = metrics
        self._limits = limits
        self._tokenizers = tokenizers
        self._large = asyncio.Semaphore(_LARGE_MAX)
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.connect_s, sock_read=limits.stall_s
        )

    async def handle(
        self, request: web.Request, body: bytes, release: Callable[[], None]
    ) -> web.StreamResponse:
        """Handle a request for an engine. ``release`` is called when its body is not needed any
        more. Raises Refusal.
        """
        parsed = await self._parsed(request, body)
        del body
        attempts = Attempts(
            client_of(request.headers, request.remote),
            method=request.method,
            path=parsed.path,
            retries=self._limits.retries,
            queue_s=self._limits.queue_s,
        )
        while True:
            try:
                await self._pause(parsed, attempts)
                placement = await self._director.place(parsed, attempts)
            except Refusal as refusal:
                return attempts.response(refusal)
            try:
                return await self._attempt(request, parsed, placement, release, attempts)
            except UnansweredError as error:
                log.warning("%s: %s", placement.engine.url, error)
                self._metrics.retried(placement.engine)
                if not await attempts.may_retry(placement.engine, error):
                    return attempts.response()

    async def _pause(self, parsed: ParsedRequest, attempts: Attempts) -> None:
        """Wait until a request may be sent to a worker: one that did not request a pause, or one
        whose pause has ended, which is then dropped. The request is not in the queue meanwhile, so
        it blocks no other. Raises Refusal, also if that takes too long.
        """
        paused_until = attempts.paused_until
        while paused_until and not self._director.has_other(parsed, paused_until):
            worker = min(paused_until, key=paused_until.__getitem__)
            left = paused_until[worker] - time.perf_counter()
            if left <= 0:
                del paused_until[worker]
                return
            if paused_until[worker] > attempts.until_s:
                raise Refusal(503, "every worker requested a longer pause")
            await asyncio.sleep(min(left, _PAUSE_LOOK_S))

    async def _attempt(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        placement: Placement,
        release: Callable[[], None],
        attempts: Attempts,
    ) -> web.StreamResponse:
        """Serve a request by the engine on which it was placed, at first after a remote prefill if
        that is allowed. Raises UnansweredError.
        """
        async with placement:
            if not attempts.tried:
                await self._remote.prefill(parsed, placement.choice)
            try:
                return await self._exchange(request, parsed, placement, release)
            except UnansweredError:
                placement.answered("unanswered")
                raise

    async def _parsed(self, request: web.Request, body: bytes) -> ParsedRequest:
        if request.method == "OPTIONS":  # a preflight of a browser, which any engine can serve
            return ParsedRequest(request.path, b"", odd=True)
        encoding = request.headers.get("Content-Encoding", "")
        parse = partial(
            parse_request,
            *(plain_path(request.rel_url.raw_path) or request.path, body),
            tokenizer_of=self._tokenizers.of,
            is_json=_is_json(request.content_type),
            encoding="" if encoding.lower() == "identity" else encoding[:40],
        )
        slow = _SLOW_TO_TOKENIZE if self._tokenizers.loaded else SLOW_SIZE
        if len(body) <= slow:
            parsed = parse()
        elif len(body) <= _LARGE_SIZE:
            parsed = await in_prompt_thread(parse)
        else:
            async with self._large:
                parsed = await in_prompt_thread(parse)
        if not parsed.exact and len(parsed.tokens):
            tokens = await self._tokenizers.by_engine(parsed.path, parsed.model, body)
            if tokens is not None:
                parsed.take_tokens(tokens)
        return parsed

    async def _exchange(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        placement: Placement,
        release: Callable[[], None],
    ) -> web.StreamResponse:
        """Send the request and forward the response. Raises UnansweredError if no response has
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
            raise UnansweredError(502, words_of(error), begun=begun) from error
        async with response:
            if response.status in _BUSY:
                pause_s = retry_after_s(response.headers, self._limits.cool_down_max_s)
                pause_s = max(pause_s, _BUSY_S)
                engine.busy(placement.client, pause_s)
                why = f"it returned {response.status}"
                answer = await _whole(response, engine.url)
                raise UnansweredError(response.status, why, answer, pause_s=pause_s)
            engine.answered(response.status)
            target = web.StreamResponse(
                status=response.status,
                reason=response.reason,
                headers=for_client(response.headers, engine.url),
            )
            target.headers["X-Beluga-Worker"] = str(engine.worker.worker_id)
            target.headers["X-Beluga-Hit-Rate"] = f"{placement.choice.hit_rate:.3g}"
            if response.content_length is not None:
                target.content_length = response.content_length
            with EngineResponse(response, self._limits.stall_s) as source:
                try:
                    first = await source.next()
                    if parsed.path == RESPONSES and response.status == HTTPStatus.OK:
                        first += await _until_data(source, first)
                        self._director.responses.made(first, engine.worker.worker_id)
                except BrokenOffError as error:
                    engine.broke_off(placement.client, str(error))
                    raise UnansweredError(502, str(error), begun=True) from error
                placement.first_token()
                parsed.drop_body()  # the body will not be sent again
                release()
                await self._pass_on(request, source, first, target, placement)
            return target

    async def _pass_on(
        self,
        request: web.Request,
        source: EngineResponse,
        first: bytes,
        target: web.StreamResponse,
        placement: Placement,
    ) -> None:
        connection_of(request).slot.patience_s = placement.reader_patience_s
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
    accepted = ("application/json", "application/octet-stream")
    return kind in accepted or (kind.startswith("application/") and kind.endswith("+json"))


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


async def _until_data(source: EngineResponse, first: bytes) -> bytes:
    """Return the continuation of a stream's first piece, up to the first event's data."""
    more = b""
    while source.has_events and b"data:" not in first + more:
        piece = await source.next()
        if not piece:
            break
        more += piece
    return more


async def _whole(response: aiohttp.ClientResponse, url: str) -> web.Response | None:
    """Return an engine's complete response for the client, or None if it aborts."""
    try:
        body = await read_whole(response, _REFUSAL_SIZE_MAX)
    except FAILURES:
        return None
    headers = for_client(response.headers, url)
    return web.Response(status=response.status, reason=response.reason, body=body, headers=headers)


async def _end_broken(
    request: web.Request, source: EngineResponse, target: web.StreamResponse, error: BrokenOffError
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
