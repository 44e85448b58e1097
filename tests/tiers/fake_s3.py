# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The part of S3's protocol that the remote tier uses, on loopback."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_DATE = "Mon, 02 Nov 2026 00:00:00 GMT"


class FakeS3:
    """A server of one bucket. ``status`` other than 0 is the response to every request, and
    ``put_status`` to those that store an object.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.status = self.put_status = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None: ...

            def do_PUT(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if not self._refused("PUT"):
                    owner.objects[self.path] = data
                    self._answer(200)

            def do_GET(self) -> None:
                if not self._refused("GET"):
                    data = owner.objects.get(self.path)
                    self._answer(404 if data is None else 200, data or b"")

            def do_HEAD(self) -> None:
                if not self._refused("HEAD"):
                    data = owner.objects.get(self.path)
                    self._answer(404 if data is None else 200, data or b"", body=False)

            def do_POST(self) -> None:
                """Delete one or more objects: obstore has no other request for one."""
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                if not self._refused("DELETE"):
                    names = re.findall("<Key>(.*?)</Key>", body)
                    for name in names:
                        owner.objects.pop(f"/bucket/{name}", None)
                    deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
                    self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

            def _refused(self, method: str) -> bool:
                owner.requests.append(method)
                status = owner.status or (owner.put_status if method == "PUT" else 0)
                if status:
                    self._answer(status)
                return bool(status)

            def _answer(self, status: int, data: bytes = b"", *, body: bool = True) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Last-Modified", _DATE)
                self.send_header("ETag", '"1"')
                self.end_headers()
                if body:
                    self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, port: int | None = None) -> str:
        """Return the URL of a remote tier, by another port if it has a proxy."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return f"s3://bucket/rack?endpoint={endpoint}&skip_signature=true"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
