# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""vLLM accepts the ``vllm serve`` commands that the documents show."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.shown import PAGES, blocks, commands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # the packages may have to be downloaded


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
    assert all("BelugaConnector" in json.dumps(one) for one in given)
    assert json.loads(made.stdout.splitlines()[-1]) == [one["kv_connector"] for one in given]
    assert parsed(vllm_python, [[*lines[0], "--no-such-option"]]).returncode == 2
