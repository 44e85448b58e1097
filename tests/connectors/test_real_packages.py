# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache and SGLang as released, on a pool: they load our plugins and get their bytes back."""

from __future__ import annotations

import json
import lzma
import os
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from beluga import IndexServer, Pool

ROOT = Path(__file__).resolve().parent.parent.parent
LONG_S = 200.0  # timeout of events that take ten seconds on an idle machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # the packages may have to be downloaded


class Role:
    """A process that runs a role over a pool and replies in lines of JSON."""

    def __init__(self, python: Path, script: str, *arguments: str, log: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "BELUGA_POOL"}
        environment["LMCACHE_TRACK_USAGE"] = "false"
        environment["PYTHONPATH"] = str(ROOT)  # these sources, independent of the environment
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [python, Path(__file__).with_name(script), *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                bufsize=1,
            )

    def receive(self) -> Any:
        """Return the next answer."""
        assert self._process.stdout
        assert select.select([self._process.stdout], [], [], LONG_S)[0], self._log.read_text()
        line = self._process.stdout.readline()
        assert line, self._log.read_text()
        return json.loads(line)

    def request(self, word: str) -> Any:
        assert self._process.stdin
        self._process.stdin.write(word + "\n")
        return self.receive()

    def end(self) -> None:
        """Close its input, and check that it succeeds."""
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.wait(timeout=LONG_S) == 0, self._log.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


@pytest.fixture
def start(python: Path, pool_name: str, tmp_path: Path) -> Iterator[Callable[..., Role]]:
    """A function that starts a role over the pool."""
    started: list[Role] = []

    def start(script: str, *arguments: str) -> Role:
        log = tmp_path / f"role-{len(started)}.log"
        started.append(Role(python, script, pool_name, *arguments, log=log))
        return started[-1]

    yield start
    for role in started:
        role.kill()


def test_lmcache_loads_objects_stored_by_another_process(
    pool: Pool, start: Callable[..., Role]
) -> None:
    everything = {"hits": [8, 8], "whole": 16}
    with IndexServer(pool):
        first = start("lmcache_role.py", "20000")
        assert first.request("store") == 16 * 16384
        assert first.request("clear")
        assert first.request("load").items() >= everything.items()
        assert first.request("engine_store") == 8
        assert first.request("engine_close")
        assert first.request("close")
        first.end()
        second = start("lmcache_role.py", "8000")
        assert second.request("load_other_layout")["hits"] == [0, 0]
        assert second.request("load").items() >= everything.items()
        assert second.request("engine_load") == {"hits": 8, "whole": 8}
        assert second.request("clear")
    assert second.request("load")["hits"] == [0, 0]
    assert second.request("engine_load") == {"hits": 0, "whole": 0}
    assert second.request("engine_close")
    assert second.request("close")
    second.end()


def test_lmcache_finds_windows_and_states_of_a_hybrid_model(
    pool: Pool, start: Callable[..., Role]
) -> None:
    """After more than 64 missing chunks."""
    with IndexServer(pool):
        first = start("lmcache_role.py", "20000")
        assert first.request("store_sparse") == (130 + 4 + 2) * 16384
        assert first.request("close")
        assert first.request("engine_close")
        first.end()
        second = start("lmcache_role.py", "20000")
        assert second.request("load_sparse") == {
            "hits": [[130, [129, 128, 127]], [2, [129, 128]], [1, [129]]],
            "whole": 133,
        }
        assert second.request("engine_close")
        assert second.request("close")
        second.end()


def test_sglang_stores_and_loads_pages_through_the_backend(
    server: IndexServer, start: Callable[..., Role]
) -> None:
    role = start("sglang_role.py")
    report = role.receive()
    role.end()
    assert report["differences"] == []
    assert len(report["trips"]) == 14
    assert [name for name, good in report["trips"].items() if not good] == []


@pytest.mark.parametrize("seed", [1, 2])
def test_the_controller_of_sglang_has_equal_results_with_beluga_and_files(
    server: IndexServer, start: Callable[..., Role], tmp_path: Path, seed: int
) -> None:
    role = start("sglang_controller_role.py", str(tmp_path), str(seed))
    report = role.receive()
    role.end()
    assert report["differ"] == []
    assert len(report["runs"]) == 6
    for how, run in report["runs"].items():
        assert (how, run["differ"]) == (how, [])
        assert run["hits"] > 0
    # test_sglang.py replays these, without SGLang
    recorded = Path(__file__).with_name("sglang_calls.json.xz").read_bytes()
    assert report["calls"] == json.loads(lzma.decompress(recorded))


@pytest.mark.parametrize("seed", [1, 2])
def test_hybrid_pools_of_sglang_have_equal_results_with_beluga_and_files(
    server: IndexServer, start: Callable[..., Role], tmp_path: Path, seed: int
) -> None:
    role = start("sglang_pools_role.py", str(tmp_path), str(seed))
    report = role.receive()
    role.end()
    assert len(report["runs"]) == 3
    for layout, run in report["runs"].items():
        assert (layout, run["differ"]) == (layout, [])
        assert run["restored"] > 10
    assert report["without KV"] == [
        [0, {"kv": 4}, []],
        [3, {"kv": 4, "indexer": 3}, [1, 2, 3]],
        [2, {"kv": 4, "indexer": 3, "mamba": 2}, [2]],
        [True] * 4,
        [True] * 4,
    ]


def test_sglang_never_finds_kv_of_other_weights_adapters_or_salts(
    server: IndexServer, start: Callable[..., Role]
) -> None:
    role = start("sglang_weights_role.py")
    report = role.receive()
    role.end()
    assert "ConnectorError: SGLang 0.5.19 gives" in report.pop("refusal")
    assert report == {
        "put": [4, 4],
        "adapters and salts": [0, 0, 0],
        "with salt": [4, 4],
        "with another salt": [0, 0],
        "cleared": [0, 0, 0],
        "put again": [4, 4],
        "updated": [0, 4, 4],
        "updated without a name": [0, 0],
        "updated without a flush": [0, 0],
        "known again": [0, 4, 4],
    }
