# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A small pool, by its paths, which connectors open themselves; and LMCache's plugins over it."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes import LONG_S, PACKAGE, Allocator, Make, MakeAdapter, Metadata
from support.blocks import eventually

from beluga import IndexServer, Pool
from beluga.connectors import records

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE_SIZE = 48 << 20


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    """Two sparse devices in memory, without a server."""
    with Pool.create([shm / "a", shm / "b"], device_size=DEVICE_SIZE, sparse=True) as pool:
        yield pool


@pytest.fixture
def pool_name(pool: Pool) -> str:
    """The pool in the form of a setting."""
    return ":".join(str(device.path) for device in pool.devices)


@pytest.fixture
def records_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions pin no records (``test_generation.py``), for tests that count the pins of blocks."""
    monkeypatch.setattr(records, "_retain", lambda *_: None)


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter with LMCache and SGLang. For slow tests: it may have to be installed."""
    setup = subprocess.run(
        [ROOT / "scripts/dev/setup-adapters"], capture_output=True, text=True, check=False
    )
    if setup.returncode == 77:
        pytest.skip(setup.stderr.strip().splitlines()[-1])
    assert setup.returncode == 0, setup.stderr
    return ROOT / ".venv-adapters/bin/python"


@pytest.fixture
def lmcache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our package, over the fake."""
    for name, module in fakes.lmcache().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module(PACKAGE)
    for name in ("l2", "plugin"):
        sys.modules.pop(f"{PACKAGE}.{name}", None)


@pytest.fixture
def lone_adapter(lmcache: Any, pool_name: str) -> Iterator[MakeAdapter]:
    """A function that makes an L2 adapter; its arguments replace the usual settings."""
    made: list[Any] = []

    def make(*, attached: bool = True, **settings: Any) -> Any:
        usual = {"pool": pool_name, "timeout_ms": 5000, "retry_s": 0.05, "identity": "a test"}
        made.append(lmcache.BelugaL2Adapter(usual | settings))
        assert eventually(lambda: made[-1].report_status()["attached"] == attached, LONG_S)
        return made[-1]

    yield make
    for l2_adapter in made:
        l2_adapter.close()


@pytest.fixture
def adapter(server: IndexServer, lone_adapter: MakeAdapter) -> MakeAdapter:
    """The same, with a server of the pool."""
    return lone_adapter


@pytest.fixture
def lone_backend(lmcache: Any, pool_name: str) -> Iterator[Make]:
    """A function that makes a storage plugin."""
    made: list[Any] = []

    def make(
        *,
        attached: bool = True,
        layers: int = 4,
        model_name: str = "model",
        metadata: Any = None,
        layerwise: bool = False,
        **settings: Any,
    ) -> Any:
        usual = {
            "beluga.pool": pool_name,
            "beluga.timeout_ms": 5000,
            "beluga.identity": "a test",
            "other.thing": 1,
        }
        extra = usual | {f"beluga.{name}": value for name, value in settings.items()}
        config = types.SimpleNamespace(extra_config=extra, use_layerwise=layerwise)
        about = metadata or Metadata(layers, model_name)
        made.append(lmcache.BelugaBackend("cpu", config, about, Allocator(), None))
        assert eventually(lambda: made[-1].attached == attached, LONG_S)
        return made[-1]

    yield make
    for plugin in made:
        plugin.close()


@pytest.fixture
def backend(server: IndexServer, lone_backend: Make) -> Make:
    """The same, with a server of the pool."""
    return lone_backend
