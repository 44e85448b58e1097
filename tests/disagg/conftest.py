# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prefill queues under test, each with a server that can be killed and restarted."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from nats_server import NatsServer
from support import coroutines, roles
from support.role import Process

from beluga.pool import Pool

pytest.importorskip("msgspec", reason="msgspec is not installed")


class Backend(Protocol):
    """A server that keeps queues."""

    @property
    def url(self) -> str: ...

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        ...

    def start(self) -> None:
        """Start another server with the data of the first one."""
        ...

    def end(self) -> None: ...


def nats_backend(directory: Path) -> Backend:
    pytest.importorskip("nats", reason="nats-py is not installed")
    return NatsServer(directory)


class PoolBackend:
    """A pool with a server process."""

    def __init__(self, directory: Path) -> None:
        self.paths = [directory / name for name in "ab"]
        Pool.create(self.paths, device_size=64 << 20, sparse=True).close()
        self.start()

    @property
    def url(self) -> str:
        return ":".join(map(str, ["pool", *self.paths]))

    def start(self) -> None:
        self._server = Process(roles.serve_index, self.paths)

    def kill(self) -> None:
        self._server.kill()

    def end(self) -> None:
        self.kill()


BACKENDS = {"nats": nats_backend, "pool": PoolBackend}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, shm: Path) -> Iterator[Backend]:
    made = BACKENDS[request.param](shm)
    yield made
    made.end()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return coroutines.call(pyfuncitem, asyncio.run)
