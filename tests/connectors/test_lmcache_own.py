# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache's own tests of a second level, run against our adapter: its contract, quotas, eviction,
the controllers that store and prefetch, and the creation and removal of adapters.

The tests are in LMCache's source distribution, which is downloaded and not copied into the project.
"""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from beluga import IndexServer, Pool

ROOT = Path(__file__).resolve().parent.parent.parent
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


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
