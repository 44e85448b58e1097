# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""JSON over HTTP for leases. Every call has a deadline, and every answer has a size limit."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from beluga.errors import LeaseError

ANSWER_SIZE_MAX = 1 << 20  # bytes
# There is no proxy and no redirection, so the token reaches only the configured server.
_NO_PROXY = urllib.request.ProxyHandler({})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class JsonService:
    """A service at ``base`` that accepts and returns JSON objects."""

    def __init__(
        self,
        base: str,
        *,
        timeout_s: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.base = base
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(
            _NO_PROXY, _NoRedirect, urllib.request.HTTPSHandler(context=context)
        )

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, token: str = ""
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer. An answer that is not a JSON object becomes an empty
        object. ``token`` is the value of the Authorization header.

        Raises :class:`~beluga.errors.LeaseError` if there is no answer in time.
        """
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = token
        request = urllib.request.Request(  # noqa: S310
            self.base + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
            method=method,
        )
        try:
            try:
                with self._opener.open(request, timeout=self._timeout_s) as response:
                    return response.status, _object(response.read(ANSWER_SIZE_MAX))
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, _object(error.read(ANSWER_SIZE_MAX))
        except (OSError, http.client.HTTPException) as error:
            raise LeaseError(f"{self.base} does not answer: {error}") from None


def _object(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
