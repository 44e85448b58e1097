# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An HTTP server of JSON on loopback, in place of the services that keep leases."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


class JsonServer(ThreadingHTTPServer):
    """Answers one request at a time with :meth:`answer`, which subclasses define."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.status = 0  # a status for every answer
        self.tokens: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        raise NotImplementedError


class _Handler(BaseHTTPRequestHandler):
    server: JsonServer

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        with self.server.lock:
            self.server.tokens.add(self.headers.get("Authorization", ""))
            if self.server.status:
                status, answer = self.server.status, {"message": "not today", "error": "not now"}
            else:
                status, answer = self.server.answer(self.command, self.path, body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Log nothing."""


Server = TypeVar("Server", bound=JsonServer)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Run the server on a separate thread."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
