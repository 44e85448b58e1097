# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real listeners, and a harmless client of each.

One ``beluga gateway`` has the listeners of clients and of operators, one ``beluga serve`` the admin
port, the local socket and the replay. Attackers use plain sockets.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from beluga.admin.local_socket import connect
from beluga.pool import Pool

Start = Callable[..., Any]
T = TypeVar("T")
ANSWER_S = 30.0  # timeout of events that take milliseconds on an idle machine; attacks last longer
FILES = 100  # descriptors of the attacked processes


@dataclass
class Engine:
    """An engine in its own thread: it records each request, and responds to the paths of models."""

    seen: list[tuple[str, str]] = field(default_factory=list)  # method and path
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)  # of its answers
    chunks: int = 0  # of 64 KiB, of an endless answer
    pause_s: float = 0.0  # before a completion

    def begin(self) -> None:
        """Drop earlier requests, and respond as usual."""
        self.seen.clear()
        self.headers, self.chunks = {}, 0

    @contextmanager
    def running(self) -> Iterator[Engine]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        def call(what: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(what, loop).result(60)

        runner = call(self._start())
        try:
            yield self
        finally:
            call(runner.cleanup())
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
        return runner

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        if request.path in ("/health", "/metrics"):
            return web.Response(text="vllm:num_requests_running 0\n")
        self.seen.append((request.method, request.raw_path))
        await asyncio.sleep(self.pause_s)
        if not self.chunks:
            return web.json_response({"choices": []}, headers=self.headers)
        endless = web.StreamResponse()
        await endless.prepare(request)
        for _ in range(self.chunks):
            await endless.write(bytes(1 << 16))
        return endless


@dataclass
class Listener:
    """A listener of HTTP. ``health`` is the request of a harmless client."""

    name: str
    address: tuple[str, int] | Path
    process: subprocess.Popen[str]
    health: str
    large: str = ""  # a path with a large answer

    def connect(self) -> socket.socket:
        if isinstance(self.address, Path):
            return connect(self.address.parent, self.address.name, ANSWER_S)
        return socket.create_connection(self.address, ANSWER_S)

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", timeout=ANSWER_S)
        connection.sock = self.connect()
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.putrequest(method, path, skip_host="Host" in named)
            for name, value in named.items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def raw(self, request: bytes) -> bytes:
        """Return the beginning of the answer to these bytes; b"" if the connection was ended."""
        with self.connect() as peer, suppress(ConnectionError):
            peer.sendall(request)
            return peer.recv(4096)
        return b""

    def rss(self) -> int:
        """Return how many bytes of memory its process has."""
        text = Path(f"/proc/{self.process.pid}/statm").read_text()
        return int(text.split()[1]) * resource.getpagesize()


def status_of(answer: bytes) -> int:
    """Return the status of an answer; 0 if there is none."""
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.") else 0


@dataclass
class Site:
    """All listeners."""

    engine: Engine
    http: dict[str, Listener]
    replay: str
    events: str
    paths: list[Path]


def _line(child: Any) -> dict[str, Any]:
    """Return the next line that a command prints."""
    line = child.stdout.readline()
    assert line, "it has ended"
    announced: dict[str, Any] = json.loads(line)
    return announced


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.rstrip("/").rpartition("//")[2].rpartition(":")
    return host, int(port)


@contextmanager
def site(start: Start, folder: Path, endpoints: tuple[str, str]) -> Iterator[Site]:
    """Start all listeners."""
    paths = [folder / name for name in "ab"]
    pool = Pool.create(paths, device_size=64 << 20, sparse=True)
    runtime = pool.runtime_dir
    pool.close()
    with ExitStack() as stack:
        engine = stack.enter_context(Engine().running())
        gateway = start(
            *("gateway", "--worker", engine.url, "--port", 0, "--admin", "127.0.0.1:0", "--json"),
            *("--health-interval", 0.1, "--policy", "round-robin"),
        )
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        server = start(
            *("serve", "--pool", paths[0], "--pool", paths[1], "--admin", 0, "--json"),
            *("--events", endpoints[0], "--events-replay", endpoints[1]),
        )
        started, serving, _ = _line(gateway), _line(server), _line(server)
        listeners = (
            Listener("clients", _address(started["url"]), gateway, "/health", "/v1/large"),
            Listener("operators", _address(started["admin"]), gateway, "/workers", "/alerts"),
            Listener("admin port", _address(serving["url"]), server, "/healthz", "/"),
            Listener("local socket", runtime / "admin.sock", server, "/healthz", "/"),
        )
        served = Site(
            engine,
            {listener.name: listener for listener in listeners},
            endpoints[1],
            endpoints[0],
            paths,
        )
        while served.http["clients"].request("GET", "/ready")[0] != 200:
            pass
        yield served
