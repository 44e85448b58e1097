# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache and SGLang as released, on a pool: they load our plugins and get their bytes back.

LMCache's own tests of a second level run against our adapter: its contract, quotas, eviction, the
controllers that store and prefetch, and the creation and removal of adapters. They are in LMCache's
source distribution, which is downloaded and not copied into the project.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import select
import subprocess
import tarfile
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
        listed = {"sizes": [16384] * 16, "name": "beluga", "shared": True}
        assert first.request("listed") == listed
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
    role = start("sglang_role.py", "storage")
    report = role.receive()
    role.end()
    assert report["differences"] == []
    assert len(report["trips"]) == 14
    assert [name for name, good in report["trips"].items() if not good] == []


@pytest.mark.parametrize("seed", [1, 2])
def test_the_controller_of_sglang_has_equal_results_with_beluga_and_files(
    server: IndexServer, start: Callable[..., Role], tmp_path: Path, seed: int
) -> None:
    role = start("sglang_role.py", "controller", str(tmp_path), str(seed))
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
    role = start("sglang_role.py", "pools", str(tmp_path), str(seed))
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
    role = start("sglang_role.py", "weights")
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


# ---- LMCache's own tests

VERSION = "0.5.6"
PYTEST = ("pytest", "pluggy", "iniconfig", "pygments", "pytest-asyncio")
FOLDER = "tests/v1/distributed"
FILES = (
    "test_mock_l2_adapter.py",
    "test_cache_salt_l2_eviction.py",
    "test_store_controller.py",
    "test_prefetch_controller.py",
    "test_distributed_storage_manager.py",
    "test_runtime_adapters.py",
    "test_report_status.py",
    "test_l1_l2_state_metrics.py",
    "test_multimodel.py",
)
OF_THE_MOCK = ("test_store_completion_is_delayed_by_bandwidth",)  # simulates a slow device
PASSED_MIN = 45  # some are for GPUs


def pip(python: Path, *arguments: str, path: str = "") -> None:
    """Run pip, or skip the test with its last line."""
    # LMCache's metadata is made by its setup.py, which must not search for a GPU's compiler.
    environment = os.environ | {"NO_NATIVE_EXT": "1", "NO_GPU_EXT": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [python, "-m", "pip", "-q", "--disable-pip-version-check", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        errors = [line.strip() for line in done.stderr.splitlines() if "rror" in line]
        pytest.skip(f"pip {arguments[0]}: {(errors or ['it failed'])[0]}")


@pytest.fixture(scope="module")
def theirs(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with LMCache's tests, and pytest in ``site``."""
    folder = tmp_path_factory.mktemp("lmcache")
    site, build = folder / "site", folder / "build"
    pip(python, "install", "--no-deps", "--target", str(site), *PYTEST)
    pip(python, "install", "--target", str(build), "setuptools>=77", "setuptools_scm")
    wanted = f"lmcache=={VERSION}"
    options = "--no-deps", "--no-build-isolation", "--no-binary", "lmcache", "-d", str(folder)
    pip(python, "download", *options, wanted, path=str(build))
    with tarfile.open(folder / f"lmcache-{VERSION}.tar.gz") as archive:
        members = [m for m in archive if re.match(r"[^/]+/(tests/|pytest\.ini$)", m.name)]
        archive.extractall(folder, members, filter="data")
    tests = folder / f"lmcache-{VERSION}"
    (tests / "tests/conftest.py").unlink()  # the fixtures need a GPU
    return tests


@pytest.fixture
def roomy(shm: Path) -> Iterator[Pool]:
    """A pool for all the adapters of the tests."""
    paths = [shm / "roomy-a", shm / "roomy-b"]
    with Pool.create(paths, device_size=256 << 20, sparse=True) as pool, IndexServer(pool):
        yield pool


def test_the_tests_of_lmcache_for_storage_plugins_pass(
    python: Path, theirs: Path, roomy: Pool
) -> None:
    names = [name for name in FILES if (theirs / FOLDER / name).exists()]
    assert names == list(FILES)
    path = os.pathsep.join(map(str, (ROOT, Path(__file__).parent, theirs.parent / "site", theirs)))
    environment = os.environ | {
        "BELUGA_TEST_POOL": ":".join(str(device.path) for device in roomy.devices),
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONPATH": path,
    }
    quiet = "-q", "-o", "log_cli=false", "-W", "ignore", "-p", "no:cacheprovider", "--tb=short"
    without = [part for name in OF_THE_MOCK for part in ("--deselect", where(name))]
    done = subprocess.run(
        [python, "-m", "pytest", *quiet, "-p", "lmcache_own_l2", *without]
        + [f"{FOLDER}/{name}" for name in FILES],
        cwd=theirs,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) >= PASSED_MIN, done.stdout[-2000:]


def where(name: str) -> str:
    return f"{FOLDER}/test_mock_l2_adapter.py::TestBandwidthSimulation::{name}"
