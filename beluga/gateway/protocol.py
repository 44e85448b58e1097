# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""HTTP between clients, the gateway and engines: the gateway's own error responses, the headers
that are forwarded (RFC 9110, 7.6.1), and the reading of an engine's response.

Errors have OpenAI's format, as JSON or as an event. An engine's own address in response headers
would lead clients around the proxy, so it is removed: ``Location: http://engine:8000/v1/x`` becomes
``Location: /v1/x``.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


class Refusal(Exception):  # noqa: N818  a response, raised
    """An error response of the router itself. ``retry_after_s`` is the time until a retry."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self._param = param
        self._retry_after_s = retry_after_s

    def response(self) -> web.Response:
        """Return the HTTP response."""
        headers = {}
        if self._retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self._retry_after_s)))
        answer = web.Response(
            status=self.status,
            body=msgspec.json.encode(error_body(self.status, str(self), self._param)),
            content_type="application/json",
            headers=headers,
        )
        if self.status == HTTPStatus.REQUEST_TIMEOUT:  # the rest of the request may still arrive
            answer.force_close()
        return answer


def error_body(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """Return vLLM's error object, which is OpenAI's with the status as its code. A lone surrogate,
    which JSON allows but UTF-8 does not, becomes a question mark.
    """
    message = message.encode(errors="replace").decode()
    kind = _KINDS.get(status) or ("InternalServerError" if status >= 500 else _KINDS[400])
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_event(status: int, message: str) -> bytes:
    """Return a server-sent event that ends a stream; clients of OpenAI's API raise it as an error.
    No ``[DONE]`` follows, because the stream is incomplete. The leading empty line ends an event of
    which the client may already have some lines.
    """
    return b"\ndata: " + msgspec.json.encode(error_body(status, message)) + b"\n\n"


# ---- Headers


# Headers of one hop. Content-Length is set again for the forwarded body.
_HOP = frozenset(
    (
        "connection",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# Further headers of a request that are not forwarded: the URL has the host; the service's session
# requests uncompressed responses; and the body has been read, so "100 Continue" is pointless.
_REQUEST = _HOP | {"host", "accept-encoding", "expect"}
_ANSWER = _HOP | {"alt-svc"}  # other addresses of the engine


def for_engine(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return a client's headers for an engine."""
    return _passed(headers, _REQUEST)


def for_client(headers: Mapping[str, str], url: str) -> CIMultiDict[str]:
    """Return the headers of the engine at a URL for the client."""
    passed = _passed(headers, _ANSWER)
    host = _host(url)
    if host in "\n".join(passed.values()):
        own = _own_address(url)
        return CIMultiDict(
            (name, own.sub("", value) or "/" if value else value) for name, value in passed.items()
        )
    return passed


@lru_cache(maxsize=1024)
def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


@lru_cache(maxsize=1024)
def _own_address(url: str) -> re.Pattern[str]:
    """Return a pattern for an engine's address in a header, including the base path before its own
    paths.
    """
    address = urlsplit(url)
    default = ":443" if address.scheme == "https" else ":80"
    bare = address.netloc.removesuffix(default)
    port = f"(?:{default})?" if address.port is None or bare != address.netloc else ""
    path = f"(?:{re.escape(address.path)}(?![^/?#]))?" if address.path else ""
    return re.compile(rf"(?:https?:)?//{re.escape(bare)}{port}(?![\w.:-]){path}", re.IGNORECASE)


def _passed(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    if "Connection" in headers:  # of which there may be several
        dropped = dropped | {
            word.strip().lower()
            for name, value in headers.items()
            if name.lower() == "connection"
            for word in value.split(",")
        }
    return CIMultiDict([item for item in headers.items() if item[0].lower() not in dropped])


def retry_after_s(headers: Mapping[str, str], limit: float) -> float:
    """Return the seconds of a ``Retry-After``, at most ``limit``. Without a valid one, return 1."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return min(float(text), limit)
    try:
        wait_s = parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        wait_s = 1.0
    return min(max(wait_s, 0.0), limit)


# ---- Responses of engines


FAILURES = (
    *(aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError),
    *(msgspec.MsgspecError, RecursionError),  # the second: too deeply nested JSON
)
"""The exceptions of a request to an engine that is down or sends invalid responses."""
ANSWER_MAX = 16 << 20
"""Largest size in bytes of an engine's response that the router reads itself."""


async def read_whole(answer: aiohttp.ClientResponse, limit: int = ANSWER_MAX) -> bytes:
    """Read an engine's response. Raises one of :data:`FAILURES`, also if it is too long."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > limit:
            raise ValueError(f"its response is longer than {limit >> 20} MiB")
    return bytes(body)


def words_of(error: BaseException) -> str:
    """Return an error's text, or its type if it has none. Clients may get it, so it has no address
    of an engine.
    """
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted"
    if isinstance(error, aiohttp.InvalidURL):
        return "its URL is invalid"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0  # the errno of getaddrinfo() is negative
        why = os.strerror(number) if number > 0 else error.os_error.strerror
        return f"it accepts no connection ({why})"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "it accepts no connection in time"
    if isinstance(error, aiohttp.ClientResponseError):
        return error.message or type(error).__name__
    return str(error) or type(error).__name__
