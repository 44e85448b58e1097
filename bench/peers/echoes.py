# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Echoes by other libraries, with which calls through a pool are compared.

Server and client are two processes of one machine, both in Python. A reply is the request's bytes,
and the client ends with its own copy of them, as ``Client.call`` does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beluga.threads import wait_for

Call = Callable[[bytes], bytes]

METHOD = 192
"""The method number of a pool server's echo in Python."""

_PATH = "/beluga.Bench/Echo"
_SEGMENTS = Path("/dev/shm")  # noqa: S108  where iceoryx2 makes them
_STOP_S = 5.0
_POLLS = 1000  # between two checks for the server's end


@dataclass(frozen=True, slots=True)
class Echo:
    """A library. ``serve`` serves from a thread, at a folder and for messages of a size in bytes,
    and returns the function that ends it; ``client`` yields what calls such a server.
    """

    name: str
    module: str  # what is imported
    package: str  # on PyPI
    serve: Callable[[str, int], Callable[[], object]]
    client: Callable[[str, int], AbstractContextManager[Call]]
    how: str

    def missing(self) -> str | None:
        """Return the reason why it cannot run here, or None."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.package} is not installed; pip install {self.package}"
        return None


@contextmanager
def place() -> Iterator[str]:
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


ECHOES = {
    echo.name: echo
    for echo in (
        Echo("gRPC", "grpc", "grpcio", _serve_grpc, _grpc_client, "over a unix socket"),
        Echo("ZeroMQ", "zmq", "pyzmq", _serve_zmq, _zmq_client, "REQ and REP over ipc"),
        Echo(
            "iceoryx2",
            "iceoryx2",
            "iceoryx2",
            _serve_iceoryx2,
            _iceoryx2_client,
            "requests and responses of a fixed size over shared memory; both sides poll",
        ),
    )
}
