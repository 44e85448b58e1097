# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Weights of a real vLLM are reloaded: nothing of the old ones is hit, and nothing is mixed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from beluga import MetaServer

HERE = Path(__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_after_a_reload_no_block_of_the_former_weights_is_hit(
    vllm_python: str, tiny_model: Path, server: MetaServer, pool_name: str, tmp_path: Path
) -> None:
    words = [pool_name, str(tiny_model), str(tmp_path / "other")]
    done = subprocess.run(
        [vllm_python, str(HERE / "updates_role.py"), *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "before": 384,
        "on old KV of its own": 0,
        "after the update": 0,
        "again": 384,
        "differs": True,
        "back": 0,
        "back is the same": True,
    }
