# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fixtures: engines with fakes of vLLM (``scene.py``), and real ones (``real_engines.py``)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from beluga_bench.vllm.model import model
from real_engines import Site, made_site
from scene import Engine, Rank, Scheduler, rank_caches

from beluga import IndexServer, KVCache, Pool

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    """A small pool, with the lanes that it has by default."""
    with Pool.create([shm / "a", shm / "b"], device_size=64 << 20, sparse=True) as pool:
        yield pool


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Put fakes in place of vLLM and torch. Yields what was requested of torch."""
    requested: list[str] = []
    fake_vllm.installed(monkeypatch, requested)
    yield requested
    for name in fake_vllm.OURS:
        sys.modules.pop(f"beluga.connectors.vllm.{name}", None)


def _maker(kind: Callable[..., Any], pool_name: str) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(*given: Any, **options: Any) -> Any:
        made.append(kind(pool_name, *given, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def make(vllm: list[str], pool_name: str) -> Iterator[Callable[..., Engine]]:
    """A function that makes an engine behind vLLM's hooks."""
    yield from _maker(Engine, pool_name)


@pytest.fixture
def make_scheduler(pool_name: str) -> Iterator[Callable[..., Scheduler]]:
    """A function that makes the scheduler's side of an engine."""
    yield from _maker(Scheduler, pool_name)


@pytest.fixture
def make_rank(pool_name: str) -> Iterator[Callable[..., Rank]]:
    """A function that makes a worker."""
    yield from _maker(Rank, pool_name)


@pytest.fixture
def engine(server: IndexServer, make_scheduler: Callable[..., Scheduler]) -> Scheduler:
    made = make_scheduler()
    assert made.connection.wait(60)
    return made


@pytest.fixture
def caches(server: IndexServer, pool: Pool) -> Iterator[list[KVCache]]:
    """A cache for each rank."""
    made = rank_caches(pool)
    yield made
    for cache in made:
        cache.close()


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """A Python with vLLM. The test is skipped if it is not available."""
    command = [ROOT / "scripts/dev/setup-vllm"]
    made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1500)
    if made.returncode == 77:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    return str(ROOT / ".venv-vllm/bin/python")


@pytest.fixture(scope="session")
def tiny_model(vllm_python: str) -> Path:
    return model("tiny", vllm_python)


@pytest.fixture(scope="module")
def site(memory_root: Path, vllm_python: str, tiny_model: Path) -> Iterator[Site]:
    """A served pool with space for about three of the longest prompts."""
    with made_site(memory_root, vllm_python, tiny_model) as site:
        site.serve()
        yield site
