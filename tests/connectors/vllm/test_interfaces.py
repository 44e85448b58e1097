# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An installation with vLLM: our connector fits the interface of the version in .venv-vllm and of
the next one, changes no package that vLLM pins, is found by its name, and passes vLLM's own tests
of failed loads and of preemption.

The next version is not fetched (its wheel has 336 MB). To test with it, unpack a wheel::

    pip download vllm==0.33.0 --no-deps && unzip vllm-0.33.0-*.whl -d vllm-next
    BELUGA_VLLM_NEXT=$PWD/vllm-next scripts/test --all tests/connectors/vllm/test_interfaces.py

vLLM's tests come from its source distribution, which is fetched from the package index and not
kept.
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
from real_engines import FOLDER, in_vllm
from support.shown import PAGES, blocks, commands

LONG_S = 250  # timeout of events that take ten seconds on an idle machine
NEXT = "BELUGA_VLLM_NEXT"
ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # the packages may have to be downloaded


@pytest.mark.parametrize("version", ["0.32.", "0.33."])
def test_the_connector_implements_every_method_of_the_engine(
    vllm_python: str, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    if version == "0.33.":  # the next version is put in front of the installed one
        unpacked = os.environ.get(NEXT)
        if not unpacked:
            pytest.skip(f"{NEXT} names no unpacked wheel of vLLM 0.33")
        monkeypatch.setenv("PYTHONPATH", unpacked)
    report = in_vllm(vllm_python, "interfaces")
    assert report["version"].startswith(version)
    assert report["misfits"] == []
    assert report["extra_keys"] == [["tuned", ["cat", 1], "salt"], ["tuned"]]


def test_installing_the_connector_changes_no_other_package(
    vllm_python: str, tmp_path: Path
) -> None:
    """Without an index pip can only use installed packages, or fail."""
    report = tmp_path / "report.json"
    options = ["--dry-run", "--no-index", "--no-build-isolation", "--report", str(report)]
    command = [vllm_python, "-m", "pip", "-q", "install", *options, str(ROOT)]
    made = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=LONG_S, cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    wanted = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    assert wanted == ["beluga-kv"]


def test_vllm_finds_the_connector_by_its_name(vllm_python: str) -> None:
    assert in_vllm(vllm_python, "registered") == [
        "beluga.connectors.vllm.connector",
        "BelugaConnector",
    ]


def test_vllm_accepts_the_shown_commands(vllm_python: str) -> None:
    shown = [s.words[1:] for p in PAGES for b in blocks(p) for s in commands(b)]
    lines = [words for words in shown if words[:1] == ["serve"] and "--kv-transfer-config" in words]
    assert len(lines) >= 3
    parsed = in_vllm(vllm_python, "serve_arguments", given=lines)
    given = [json.loads(words[words.index("--kv-transfer-config") + 1]) for words in lines]
    ours = ("BelugaConnector", "beluga.connectors.vllm.tier")
    assert all(any(name in json.dumps(settings) for name in ours) for settings in given)
    assert parsed == [settings["kv_connector"] for settings in given]
    with pytest.raises(AssertionError, match="no-such-option"):
        in_vllm(vllm_python, "serve_arguments", given=[[*lines[0], "--no-such-option"]])


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
    """Runs files of vLLM's tests with ``chained.py``, and returns what pytest prints."""
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

    def run(chained: str, chosen: str, folder: str, *files: str) -> str:
        options = ["-q", "-k", chosen, "-p", "chained", "-p", "no:cacheprovider", "-c", os.devnull]
        roots = [f"--confcutdir={folder}", f"--rootdir={sources}"]
        command = [vllm_python, "-m", "pytest", *options, *roots]
        ran = subprocess.run(
            [*command, *(f"{folder}/{file}" for file in files)],
            env=environment | {"BELUGA_TEST_CHAINED": chained},
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
    printed = ours("mocks", f"not {LEFT_OUT}", UNIT, *FILES)
    counts = re.search(r"chained: (\d+) schedulers, \d+ preemptions, (\d+) blocks", printed)
    assert counts is not None
    assert int(counts[1]) >= len(FILES)
    assert int(counts[2]) > 0


def test_the_preemption_tests_of_vllm_pass_and_only_held_blocks_are_saved(
    ours: Ours,
) -> None:
    printed = ours("scheduler", "test_kv_connector_", "tests/v1/core", "test_scheduler.py")
    counts = re.search(r"chained: (\d+) schedulers, (\d+) preemptions, (\d+) blocks", printed)
    assert counts is not None
    assert all(int(count) > 0 for count in counts.groups()), counts[0]
