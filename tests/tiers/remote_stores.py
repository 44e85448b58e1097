# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks and stores for tests of the remote tier: a dict that fails as a test sets it, an emulated
S3, a Redis server, and a proxy that spoils what passes through it.
"""

import contextlib
import random
import re
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from beluga_bench.vllm.port import HOST, free_port
from numpy.typing import NDArray
from support.packages import LoopbackServer, program

from beluga.tiers.tier import BLOCK, StoredBlock

Spoil = Callable[[bytes, int], "bytes | None"]
"""Takes some bytes of a response and the number of previous ones, and returns the bytes to forward.
Fewer of them, or None, cuts the connection.
"""

_DATE = "Mon, 02 Nov 2026 00:00:00 GMT"

ROOT = Path(__file__).resolve().parents[2]


def blocks(lengths: Sequence[int], seed: int = 0) -> tuple[NDArray[np.void], NDArray[np.uint8]]:
    """Return records and payloads of random blocks; equal seeds make equal blocks."""
    random = np.random.default_rng(seed)
    records = np.zeros(len(lengths), BLOCK)
    records["key"] = random.integers(0, 1 << 64, (len(lengths), 2), np.uint64)
    records["fingerprint"] = random.integers(0, 1 << 64, len(lengths), np.uint64)
    records["length"], records["chunk_size"] = lengths, 16384
    payload = random.integers(0, 256, (len(lengths), max(lengths, default=0)), np.uint8)
    return records, payload


def same(
    blocks: Sequence[StoredBlock | None], records: NDArray[np.void], payload: NDArray[np.uint8]
) -> list[bool]:
    """Return which of the blocks were hits; one with other bytes than the saved ones fails the
    test.
    """
    for each, record, row in zip(blocks, records, payload, strict=True):
        if each is not None:
            assert each.record == record
            assert np.array_equal(each.payload, row[: record["length"]])
    return [each is not None for each in blocks]


class DictStore:
    """A store in a dict. ``before`` runs before each operation, and may raise or wait."""

    batch = 4
    threads = 8

    def __init__(self, before: Callable[[str], None] = lambda operation: None) -> None:
        self.objects: dict[str, bytes] = {}
        self.before = before
        self.calls: list[str] = []
        self.running = self.most_running = 0
        self.ended = False
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes | None:
        self._begin("get")
        return self.objects.get(name)

    def put(self, name: str, data: memoryview) -> None:
        self._begin("put")
        self.objects[name] = bytes(data)

    def create(self, name: str, data: memoryview) -> None:
        self._begin("put")
        self.objects.setdefault(name, bytes(data))

    def exists(self, names: Sequence[str]) -> list[bool]:
        assert len(names) <= self.batch
        self._begin("exists")
        return [name in self.objects for name in names]

    def delete(self, names: Sequence[str]) -> int:
        self._begin("delete")
        return sum(self.objects.pop(name, None) is not None for name in names)

    def close(self) -> None:
        assert not self.ended
        self.ended = True

    def _begin(self, operation: str) -> None:
        with self._lock:
            self.calls.append(operation)
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        try:
            self.before(operation)
        finally:
            with self._lock:
                self.running -= 1


def intact(data: bytes, before: int) -> bytes:
    return data


def cut_after(limit: int) -> Spoil:
    """Forward that many bytes of each connection, then cut it."""

    def spoil(data: bytes, before: int) -> bytes | None:
        return data[: limit - before] if before < limit else None

    return spoil


def flip_every(period: int, seed: int) -> Spoil:
    """Flip a bit in every that many bytes."""
    chance = random.Random(seed)

    def spoil(data: bytes, before: int) -> bytes:
        changed = bytearray(data)
        for position in range(-before % period, len(data), period):
            changed[position] ^= 1 << chance.randrange(8)
        return bytes(changed)

    return spoil


class ByteProxy:
    """Accepts connections and forwards them to a port. ``spoil`` may be replaced at any time. While
    ``flowing`` is not set, responses are delayed.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self.spoil: Spoil = intact
        self.flowing = threading.Event()
        self.flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lines: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        self.flowing.set()

    def drop(self) -> None:
        """Cut all connections."""
        while self._lines:
            _cut(self._lines.pop())

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            self._lines += [near, far]
            for source, target, spoils in ((near, far, False), (far, near, True)):
                threading.Thread(
                    target=self._pump, args=(source, target, spoils), daemon=True
                ).start()

    def _pump(self, source: socket.socket, target: socket.socket, spoils: bool) -> None:
        before = 0
        try:
            while data := source.recv(65536):
                answer: bytes | None = data
                if spoils:
                    self.flowing.wait()
                    answer = self.spoil(data, before)
                    before += len(data)
                if answer is None:
                    break
                target.sendall(answer)
                if len(answer) < len(data):
                    break
        except OSError:
            pass
        _cut(source)
        _cut(target)


def _cut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()


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
                if self._refused("PUT"):
                    return
                if self.headers["If-None-Match"] == "*":
                    self._answer(200 if owner.objects.setdefault(self.path, data) is data else 412)
                    return
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


class RedisServer(LoopbackServer):
    """A redis-server with its own port. It keeps nothing on disk."""

    def __init__(self, *options: str) -> None:
        pytest.importorskip("redis", reason="redis is not installed")
        port = free_port()
        words = [program("redis-server"), "--bind", HOST, "--port", port]
        words += ["--save", "", "--appendonly", "no", *options]
        super().__init__(words, port, (b"PING\r\n", b"+PONG"))

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def stop(self) -> None:
        """Stop it with SIGSTOP: connections stay open without responses."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
