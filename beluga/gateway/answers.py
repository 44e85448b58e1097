# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The router's own responses to clients: errors in OpenAI's format, as JSON or as an event."""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec
from aiohttp import web

_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
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
