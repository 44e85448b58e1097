# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Our classes fit vLLM's interfaces: those of the version in .venv-vllm, and of the next one.

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

from beluga import MetaServer

LONG_S = 250  # for what takes ten seconds on a machine that is not busy
NEXT = "BELUGA_VLLM_NEXT"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # the packages may have to be fetched


def compared(python: str, **environment: str) -> dict[str, Any]:
    made = subprocess.run(
        [python, Path(__file__).with_name("interfaces.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env=dict(os.environ) | environment,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    found: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return found


def test_the_manager_with_the_types_of_vllm(
    vllm_python: str, server: MetaServer, pool_name: str
) -> None:
    made = subprocess.run(
        [vllm_python, Path(__file__).with_name("manager_role.py"), pool_name],
        check=False,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env={key: value for key, value in os.environ.items() if key != "BELUGA_POOL"},
    )
    assert made.returncode == 0, made.stderr[-2000:]
    assert made.stdout.endswith("done\n")


def test_they_fit_the_installed_version(vllm_python: str) -> None:
    found = compared(vllm_python)
    assert found["version"].startswith("0.32.")
    assert (found["misfits"], found["not_refused"]) == ([], [])


def test_they_fit_the_next_version(vllm_python: str) -> None:
    unpacked = os.environ.get(NEXT)
    if not unpacked:
        pytest.skip(f"{NEXT} names no unpacked wheel of vLLM 0.33")
    found = compared(vllm_python, PYTHONPATH=unpacked)
    assert found["version"].startswith("0.33.")
    assert (found["misfits"], found["not_refused"]) == ([], [])
