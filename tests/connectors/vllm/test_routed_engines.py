# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Two real engines on one pool behind a router that ignores caches; one of them is killed."""

from __future__ import annotations

import json
import subprocess

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the packages may have to be installed


def test_each_turn_hits_earlier_turns_on_every_engine(vllm_python: str) -> None:
    small = ("--model", "tiny", "--tokens", "1536", "--conversations", "3", "--turns", "2")
    done = subprocess.run(
        [vllm_python, "-m", "beluga_bench.vllm.routed", *small],
        check=False,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["found_part"] > 0.9
    assert report["after_found_part"] > 0.9
    assert report["after"]["found_in_pool"] > 0  # the survivor had not computed everything
    assert report["lost"] == {"status": 200, "began": True, "error_event": True, "done": False}
