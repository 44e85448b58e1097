# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prefill queues to test, each with a server that can be killed and started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from nats_server import NatsServer, need_nats_server

pytest.importorskip("msgspec", reason="msgspec is not installed")


class Backend(Protocol):
    """Where queues live."""

    @property
    def url(self) -> str: ...

    def kill(self) -> None:
        """kill -9 of the server."""
        ...

    def start(self) -> None:
        """Another one, with what the first left behind."""
        ...

    def end(self) -> None: ...


def nats_backend(directory: Path) -> Backend:
    pytest.importorskip("nats", reason="nats-py is not installed")
    need_nats_server()
    return NatsServer(directory)


BACKENDS = {"nats": nats_backend}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, shm: Path) -> Iterator[Backend]:
    made = BACKENDS[request.param](shm)
    yield made
    made.end()
