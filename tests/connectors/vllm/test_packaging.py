# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An installation next to vLLM: it changes no package that vLLM pins, and vLLM finds it by name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.shown import PAGES, blocks, commands

ROOT = Path(__file__).resolve().parents[3]
LONG_S = 250  # timeout of events that take ten seconds on an idle machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # the packages may have to be downloaded


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


def test_vllm_finds_the_connector_by_its_name(vllm_python: str, tmp_path: Path) -> None:
    code = """
from vllm.plugins import load_general_plugins
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
load_general_plugins()
found = KVConnectorFactory.get_connector_class_by_name("BelugaConnector")
print(found.__module__, found.__name__)
"""
    made = subprocess.run(
        [vllm_python, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.split()[-2:] == ["beluga.connectors.vllm.connector", "BelugaConnector"]


def parsed(python: str, lines: list[list[str]]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, Path(__file__).with_name("serve_arguments.py")],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_vllm_accepts_the_shown_commands(vllm_python: str) -> None:
    shown = [s.words[1:] for p in PAGES for b in blocks(p) for s in commands(b)]
    lines = [words for words in shown if words[:1] == ["serve"] and "--kv-transfer-config" in words]
    assert len(lines) >= 3
    made = parsed(vllm_python, lines)
    assert made.returncode == 0, made.stderr[-2000:]
    given = [json.loads(words[words.index("--kv-transfer-config") + 1]) for words in lines]
    assert all("BelugaConnector" in json.dumps(settings) for settings in given)
    assert json.loads(made.stdout.splitlines()[-1]) == [
        settings["kv_connector"] for settings in given
    ]
    assert parsed(vllm_python, [[*lines[0], "--no-such-option"]]).returncode == 2
