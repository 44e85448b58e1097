# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the router itself says to clients: errors in OpenAI's shape, as JSON or as an event."""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

_KINDS = {
    400: "BadRequestError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


class Refusal(Exception):  # noqa: N818  an answer, raised
    """An answer of the router's own, not an engine's. ``retry_after_s``: when to come back."""

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
        """As HTTP."""
        headers = {}
        if self._retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self._retry_after_s)))
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(error_body(self.status, str(self), self._param)),
            content_type="application/json",
            headers=headers,
        )


def error_body(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """vLLM's, which is OpenAI's with the status as its code."""
    kind = _KINDS.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_event(status: int, message: str) -> bytes:
    """A server-sent event that ends a stream; clients of OpenAI's API raise it. No ``[DONE]``
    follows: a stream that broke off is not done. The empty line before it ends an event of which
    the client may have some lines already.
    """
    return b"\ndata: " + msgspec.json.encode(error_body(status, message)) + b"\n\n"
