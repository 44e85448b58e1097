# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""vLLM's own tests of loads that fail, and of preemption, from its source distribution, with our
connector in addition to their mocks.

The distribution is fetched from the package index and not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
VERSION = "0.32.0"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
JSON = "application/vnd.pypi.simple.v1+json"
FETCH_S = 120
UNIT = "tests/v1/kv_connector/unit"
FILES = (
    "test_kv_load_failure_recovery.py",
    "test_invalid_blocks_correctness.py",
    "test_error_propagation.py",
    "test_cache_pollution_prevention.py",
)
# Ours refuses an engine with two groups of layers.
LEFT_OUT = "test_block_level_load_failure_fails_closed_with_multiple_groups"
# pytest itself, which vLLM's environment lacks
PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """vLLM's source distribution, unpacked. The test is skipped without an index."""
    name = f"vllm-{VERSION}.tar.gz"
    requested = urllib.request.Request(f"{INDEX}/vllm/", headers={"Accept": JSON})  # noqa: S310
    try:
        with urllib.request.urlopen(requested, timeout=FETCH_S) as page:  # noqa: S310
            files = json.load(page)["files"]
        (listed,) = [file for file in files if file["filename"] == name]
        with urllib.request.urlopen(listed["url"], timeout=FETCH_S) as body:  # noqa: S310
            content = body.read()
    except (OSError, ValueError, urllib.error.URLError) as error:
        pytest.skip(f"vLLM's source distribution cannot be fetched: {error}")
    assert hashlib.sha256(content).hexdigest() == listed["hashes"]["sha256"]
    (tmp_path / name).write_bytes(content)
    with tarfile.open(tmp_path / name) as archive:
        tests = [member for member in archive if member.name.startswith(f"vllm-{VERSION}/tests/")]
        archive.extractall(tmp_path, members=tests, filter="data")
    return tmp_path / f"vllm-{VERSION}"


Ours = Callable[..., str]


@pytest.fixture
def ours(sources: Path, tmp_path: Path, vllm_python: str, tiny_model: Path) -> Ours:
    """Runs files of vLLM's tests with a plugin of this folder, and returns what pytest prints."""
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    home = Path(pytest.__file__).parent.parent
    for name in PYTEST:
        for path in (home / name, home / f"{name}.py"):
            if path.exists():
                (borrowed / path.name).symlink_to(path)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (borrowed, sources, FOLDER))),
        "BELUGA_TEST_MODEL": str(tiny_model),
        "HF_HUB_OFFLINE": "1",
    }

    def run(plugin: str, chosen: str, folder: str, *files: str) -> str:
        options = ["-q", "-k", chosen, "-p", plugin, "-p", "no:cacheprovider", "-c", os.devnull]
        roots = [f"--confcutdir={folder}", f"--rootdir={sources}"]
        command = [vllm_python, "-m", "pytest", *options, *roots]
        ran = subprocess.run(
            [*command, *(f"{folder}/{file}" for file in files)],
            env=environment,
            cwd=sources,
            check=False,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
        return ran.stdout

    return run


def test_the_failed_load_tests_of_vllm_pass(ours: Ours) -> None:
    printed = ours("chained_mocks", f"not {LEFT_OUT}", UNIT, *FILES)
    counts = re.search(r"chained: (\d+) schedulers, (\d+) blocks saved", printed)
    assert counts is not None
    assert int(counts[1]) >= len(FILES)
    assert int(counts[2]) > 0


def test_the_preemption_tests_of_vllm_pass_and_only_held_blocks_are_saved(
    ours: Ours,
) -> None:
    printed = ours("chained_scheduler", "test_kv_connector_", "tests/v1/core", "test_scheduler.py")
    counts = re.search(r"chained: (\d+) schedulers, (\d+) preemptions, (\d+) blocks", printed)
    assert counts is not None
    assert all(int(count) > 0 for count in counts.groups()), counts[0]
