# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Echoes by other libraries, with which calls through a pool are compared.

Server and client are two processes of one machine. The client is in Python, and so is the server,
except for Redis. A reply is the request's bytes, and the client ends with its own copy of them, as
``Client.call`` does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beluga.open_files import require_zmq_files
from beluga.threads import wait_for

from .redis_server import redis_at, redis_program

Call = Callable[[bytes], bytes]

METHOD = 192
"""The method number of a pool server's echo in Python."""

_PATH = "/beluga.Bench/Echo"
_SEGMENTS = Path("/dev/shm")  # noqa: S108  where iceoryx2 makes them
_STOP_S = 5.0
_POLLS = 1000  # between two checks for the server's end
_END = 0xFF  # the first byte of the pipe's last request; a test's request begins with a lower one


Serve = Callable[[str, int], Callable[[], object]]
"""Serves from a thread, at a folder and for messages of a size in bytes. Returns the function that
ends it.
"""


@dataclass(frozen=True, slots=True)
class Echo:
    """A library, whose server is a thread of Python or a program. ``client`` yields what calls such
    a server.
    """

    name: str
    module: str  # what is imported
    package: str  # on PyPI
    client: Callable[[str, int], AbstractContextManager[Call]]
    how: str
    serve: Serve | None = None
    program: Callable[[str], AbstractContextManager[subprocess.Popen[bytes]]] | None = None

    def missing(self) -> str | None:
        """Return the reason why it cannot run here, or None."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.package} is not installed; pip install {self.package}"
        if self.program is not None and redis_program() is None:
            return "redis-server is not installed; on Debian: apt-get install redis-server"
        return None


@contextmanager
def socket_folder() -> Iterator[str]:
    """Yield a folder for the servers' sockets and files. It is removed afterward, with the segments
    that iceoryx2 names after it, which remain if a process is killed.
    """
    with tempfile.TemporaryDirectory(prefix="beluga-bench-") as folder:
        try:
            yield folder
        finally:
            for path in _SEGMENTS.glob(f"{Path(folder).name}*"):
                path.unlink(missing_ok=True)


def _serve_grpc(folder: str, _: int) -> Callable[[], object]:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    service, method = _PATH[1:].split("/")
    echo = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: echo}),)
    )
    server.add_insecure_port(f"unix:{folder}/grpc")
    server.start()
    return lambda: server.stop(None).wait(_STOP_S)


@contextmanager
def _grpc_client(folder: str, _: int) -> Iterator[Call]:
    import grpc

    with grpc.insecure_channel(f"unix:{folder}/grpc") as channel:
        yield channel.unary_unary(_PATH)


def _serve_zmq(folder: str, _: int) -> Callable[[], object]:
    import zmq

    require_zmq_files("the echo of ZeroMQ", sockets=1)
    context = zmq.Context()
    socket = context.socket(zmq.REP)
    socket.bind(f"ipc://{folder}/zmq")

    def serve() -> None:
        try:
            while True:
                socket.send(socket.recv())
        except zmq.ContextTerminated:
            socket.close(0)

    threading.Thread(target=serve).start()
    return context.term


@contextmanager
def _zmq_client(folder: str, _: int) -> Iterator[Call]:
    import zmq

    require_zmq_files("the client of ZeroMQ", sockets=1)
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.connect(f"ipc://{folder}/zmq")

        def call(request: bytes) -> bytes:
            socket.send(request)
            return bytes(socket.recv())

        yield call


def _iceoryx2(folder: str, size: int) -> tuple[Any, Any, type[ctypes.Structure]]:
    """Return a node, the echo's service, and the type of its messages."""
    import iceoryx2

    message = type("Message", (ctypes.Structure,), {"_fields_": [("data", ctypes.c_uint8 * size)]})
    iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
    config = iceoryx2.config.default()
    config.global_cfg.root_path = iceoryx2.Path.new(folder)
    config.global_cfg.prefix = iceoryx2.FileName.new(Path(folder).name)
    # Its own handlers of signals would end the loops at Ctrl-C with errors that are not Python's.
    node = (
        iceoryx2.NodeBuilder.new()
        .config(config)
        .signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled)
        .create(iceoryx2.ServiceType.Ipc)
    )
    name = iceoryx2.ServiceName.new(f"echo {size}")
    return (
        node,
        node.service_builder(name).request_response(message, message).open_or_create(),
        message,
    )


def _serve_iceoryx2(folder: str, size: int) -> Callable[[], object]:
    ending, node_made = threading.Event(), threading.Event()

    def serve() -> None:
        # What its node makes is used by one thread.
        node, service, _ = _iceoryx2(folder, size)
        server = service.server_builder().create()
        node_made.set()
        while not ending.is_set():
            for _ in range(_POLLS):
                if (request := server.receive()) is not None:
                    request.send_copy(request.payload().contents)
        server.delete()
        del service, node

    thread = threading.Thread(target=serve)
    thread.start()
    node_made.wait(_STOP_S)

    def stop() -> None:
        ending.set()
        wait_for([thread])

    return stop


@contextmanager
def _iceoryx2_client(folder: str, size: int) -> Iterator[Call]:
    node, service, message = _iceoryx2(folder, size)
    client = service.client_builder().create()

    def call(request: bytes) -> bytes:
        pending = client.send_copy(message.from_buffer_copy(request))
        while (reply := pending.receive()) is None:
            pass
        return bytes(reply.payload().contents)

    yield call
    client.delete()
    del service, node


def _read_all(descriptor: int, size: int) -> bytes:
    """Read this number of bytes. Returns fewer at the end of the pipe."""
    chunks = []
    while size > 0 and (part := os.read(descriptor, size)):
        chunks.append(part)
        size -= len(part)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _serve_pipe(folder: str, size: int) -> Callable[[], object]:
    requests, replies = (f"{folder}/{name}" for name in ("requests", "replies"))
    os.mkfifo(requests)
    os.mkfifo(replies)
    # Opened for both directions, a pipe needs no other process and never ends.
    opened = [os.open(path, os.O_RDWR) for path in (requests, replies)]

    def serve() -> None:
        while len(request := _read_all(opened[0], size)) == size and request[0] != _END:
            os.write(opened[1], request)

    thread = threading.Thread(target=serve)
    thread.start()

    def stop() -> None:
        os.write(opened[0], bytes([_END]) * size)
        wait_for([thread])
        for descriptor in opened:
            os.close(descriptor)

    return stop


@contextmanager
def _pipe_client(folder: str, size: int) -> Iterator[Call]:
    requests = os.open(f"{folder}/requests", os.O_WRONLY)
    replies = os.open(f"{folder}/replies", os.O_RDONLY)

    def call(request: bytes) -> bytes:
        os.write(requests, request)
        return _read_all(replies, size)

    try:
        yield call
    finally:
        os.close(requests)
        os.close(replies)


@contextmanager
def _redis_client(folder: str, _: int) -> Iterator[Call]:
    import redis

    with redis.Redis(unix_socket_path=f"{folder}/redis") as client:

        def call(request: bytes) -> bytes:
            return bytes(client.execute_command("ECHO", request))

        yield call


ECHOES = {
    echo.name: echo
    for echo in (
        Echo("gRPC", "grpc", "grpcio", _grpc_client, "over a unix socket", _serve_grpc),
        Echo("ZeroMQ", "zmq", "pyzmq", _zmq_client, "REQ and REP over ipc", _serve_zmq),
        Echo(
            "iceoryx2",
            "iceoryx2",
            "iceoryx2",
            _iceoryx2_client,
            "requests and responses of a fixed size over shared memory; both sides poll",
            _serve_iceoryx2,
        ),
        Echo("pipe", "os", "python", _pipe_client, "two named pipes, read and write", _serve_pipe),
        Echo(
            "Redis",
            "redis",
            "redis",
            _redis_client,
            "ECHO by redis-py over a unix socket; the server is redis-server or valkey-server",
            program=lambda folder: redis_at(f"{folder}/redis"),
        ),
    )
}
