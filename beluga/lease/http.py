# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""JSON over HTTP for leases. Every call has a deadline, and every answer has a size limit.

A socket's own timeout starts again with each byte, so a peer that sends one byte a second would
hold a renewal until its lease has expired. Here all bytes of an answer share one deadline. There is
no proxy and no redirection, so the token reaches only the configured server.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from beluga.errors import LeaseError

ANSWER_SIZE_MAX = 1 << 20  # bytes


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
        parts = urlsplit(base)
        self._connection: Callable[..., http.client.HTTPConnection] = (
            partial(http.client.HTTPSConnection, context=context)
            if parts.scheme == "https"
            else http.client.HTTPConnection
        )
        self._place = parts.netloc

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, token: str = ""
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer. An answer that is not a JSON object becomes an empty
        object. ``token`` is the value of the Authorization header.

        Raises :class:`~beluga.errors.LeaseError` if there is no answer in time.
        """
        end_s = time.monotonic() + self._timeout_s
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if token:
            headers["Authorization"] = token
        connection = self._connection(self._place, timeout=self._timeout_s)
        connection.response_class = partial(_Response, end_s=end_s)  # type: ignore[assignment]
        try:
            connection.connect()
            _set_timeout(connection.sock, end_s)
            connection.request(
                method, path, None if body is None else json.dumps(body).encode(), headers
            )
            response = connection.getresponse()
            return response.status, _object(response.read(ANSWER_SIZE_MAX))
        except (OSError, http.client.HTTPException) as error:
            raise LeaseError(f"{self.base} does not answer: {error}") from None
        finally:
            connection.close()


class _Response(http.client.HTTPResponse):
    """An answer that has to arrive by ``end_s`` of the monotonic clock."""

    def __init__(self, line: socket.socket, *args: Any, end_s: float, **named: Any) -> None:
        super().__init__(line, *args, **named)
        self.fp = io.BufferedReader(_TimelyReader(self.fp.detach(), line, end_s))


class _TimelyReader(io.RawIOBase):
    """The bytes of a socket's file until a deadline."""

    def __init__(self, file: io.RawIOBase, line: socket.socket, end_s: float) -> None:
        self._file, self._line, self._end_s = file, line, end_s

    def readable(self) -> bool:
        """Return True: it is read by a buffer."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read some bytes. Raises TimeoutError after the deadline."""
        _set_timeout(self._line, self._end_s)
        count: int | None = self._file.readinto(buffer)
        return count

    def close(self) -> None:
        """Close the socket's file, too."""
        self._file.close()
        super().close()


def _set_timeout(line: socket.socket, end_s: float) -> None:
    """Let the next operation on a socket end by the deadline. Raises TimeoutError after it."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    line.settimeout(left_s)


def _object(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}
