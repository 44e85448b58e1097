# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Our connector fits the interface of vLLM, both of the version in .venv-vllm and of the next one.

The next one is not fetched (its wheel has 336 MB). To test with it, unpack a wheel::

    pip download vllm==0.33.0 --no-deps && unzip vllm-0.33.0-*.whl -d vllm-next
    BELUGA_VLLM_NEXT=$PWD/vllm-next scripts/test --all tests/connectors/vllm/test_interfaces.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

LONG_S = 250  # timeout of events that take ten seconds on an idle machine
NEXT = "BELUGA_VLLM_NEXT"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # the packages may have to be downloaded


@pytest.fixture(params=["0.32.", "0.33."])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The installed version, or the next one, which is put in front of it."""
    wanted: str = request.param
    if wanted == "0.33.":
        unpacked = os.environ.get(NEXT)
        if not unpacked:
            pytest.skip(f"{NEXT} names no unpacked wheel of vLLM 0.33")
        monkeypatch.setenv("PYTHONPATH", unpacked)
    return wanted


def last_line(python: str, script: str) -> str:
    """Run a script of this folder with vLLM's Python. Returns its last line."""
    made = subprocess.run(
        [python, Path(__file__).with_name(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return made.stdout.splitlines()[-1]


def test_the_connector_implements_every_method_of_the_engine(
    vllm_python: str, version: str
) -> None:
    report: dict[str, Any] = json.loads(last_line(vllm_python, "interfaces.py"))
    assert report["version"].startswith(version)
    assert report["misfits"] == []
    assert report["extra_keys"] == [["tuned", ["cat", 1], "salt"], ["tuned"]]
