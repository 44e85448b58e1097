# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fixtures with real vLLM engines for the slow tests: an environment, a model, a pool with a
server, engines.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from beluga_bench.vllm.model import SIZES, model
from beluga_bench.vllm.process import Child, Engine, options_of

from beluga import BelugaError, Pool
from beluga.index import IndexClient, IndexStat
from beluga.rpc import Client

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).parent
TOKENS = 1281  # ten blocks and a token
SERVER_S = 60.0


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


class Site:
    """A pool with a server process, and engines on it."""

    def __init__(self, folder: Path, devices: list[Path], python: str, made: Path) -> None:
        self.folder, self.python, self._model = folder, python, made
        self.paths = devices
        self.hashes = folder / "hashes"
        self._server: Child | None = None
        self._count = 0

    def serve(self, *options: str) -> None:
        """Start the server with these options, and wait until it responds."""
        code = "from beluga.cli.main import main; main()"
        self._server = Child(
            [sys.executable, "-c", code, "serve", *self.pool_options(), *options],
            log=self.folder / "server.log",
        )
        self._server.wait_for(self._answers, SERVER_S, "answer")

    def pool_options(self) -> list[str]:
        return [word for path in self.paths for word in ("--pool", str(path))]

    def _answers(self) -> bool:
        try:
            with Pool.open(self.paths) as pool, Client(pool, timeout_s=0.5) as client:
                client.ping()
        except BelugaError:
            return False
        return True

    def kill_server(self) -> None:
        assert self._server is not None
        self._server.signal(signal.SIGKILL)
        self._server.kill()

    def engine(
        self,
        name: str,
        *,
        connector: dict[str, Any] | None,
        crash: str = "",
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Engine:
        """Start an engine. ``connector`` has its settings, or is None for an engine without one."""
        environment = (
            (environment or {})
            | {
                "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
                "BELUGA_TEST_HASHES": str(self.hashes),
                "PYTHONFAULTHANDLER": "1",
            }
            | ({"BELUGA_CRASH": crash} if crash else {})
        )
        transfer = None
        if connector is not None:
            transfer = {
                "kv_connector": "HashingConnector",
                "kv_connector_module_path": "hashing",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "pool": ":".join(map(str, self.paths)),
                    "timeout_ms": 2000,
                    "retry_s": 0.2,
                    **connector,
                },
            }
        given = options_of(
            self._model, SIZES["tiny"], tokens=TOKENS, connector=transfer, dtype="float32"
        )
        self._count += 1
        return Engine(
            given | options,
            log=self.folder / f"{self._count}-{name}.log",
            python=self.python,
            environment=environment,
        )

    def check(self) -> subprocess.CompletedProcess[str]:
        """Run ``beluga pool check --payload`` on the pool while it is served."""
        code = "from beluga.cli.main import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, "pool", "check", "--payload", *self.pool_options()],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def stat(self) -> IndexStat:
        """Return the server's counters."""
        with Pool.open(self.paths) as pool, Client(pool, timeout_s=5) as client:
            return IndexClient(client).stat()

    def pinned(self) -> int:
        """Return how many blocks sessions hold."""
        return self.stat().pinned_count

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


@pytest.fixture(scope="module")
def site(memory_root: Path, vllm_python: str, tiny_model: Path) -> Iterator[Site]:
    """A served pool with space for about three of the longest prompts."""
    folder = Path(tempfile.mkdtemp(prefix="beluga-vllm-test-", dir=memory_root))
    devices = [folder / "a", folder / "b"]
    Pool.create(devices, device_size=40 << 20, lane_count=32).close()
    site = Site(folder, devices, vllm_python, tiny_model)
    try:
        site.serve()
        yield site
    finally:
        site.close()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    """Poll until the condition is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
