# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Small pools for calls, of both kinds of coherence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from other_machine import BULK, LANES, SLOTS, Elsewhere

from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Server


@pytest.fixture(params=["hardware", "software"])
def coherence(request: pytest.FixtureRequest) -> str | list[str]:
    """The coherence of all devices, or of each."""
    devices: str | list[str] = request.param
    return devices


@pytest.fixture
def pool(paths: list[Path], coherence: str | list[str]) -> Iterator[Pool]:
    with Pool.create(
        paths,
        device_size=8 << 20,
        coherence=coherence,
        sparse=True,
        lane_count=LANES,
        slot_count=SLOTS,
        bulk_size=BULK,
    ) as pool:
        yield pool


@pytest.fixture
def server(pool: Pool) -> Iterator[Server]:
    """An echo server."""
    with Server(pool) as server:
        server.handle(METHOD_USER, lambda request: request)
        yield server


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """Hide this host's lock files from processes that start within the context, as on another
    machine.
    """
    directory = tmp_path / "elsewhere"
    directory.mkdir()

    @contextmanager
    def away() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(Pool, "runtime_dir", property(lambda _: directory))
            yield

    return away
