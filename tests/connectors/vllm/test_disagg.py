# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prefill and decode on two real engines with the pool and its queue between them."""

from __future__ import annotations

import json
import subprocess

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the packages may have to be installed


def test_a_decode_engine_hits_blocks_of_a_prefill_engine(vllm_python: str) -> None:
    small = ("--model", "tiny", "--tokens", "641", "--requests", "2", "--turns", "1")
    done = subprocess.run(
        [vllm_python, "-m", "beluga_bench.vllm.disagg", *small],
        check=False,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    alone, pair = report["arms"]
    assert alone["courses"] == {"local": 2}
    assert pair["courses"] == {"remote": 2}
    assert report["decode_hit_part"] > 0.9
    assert min(arm["qps"] for arm in report["arms"]) > 0


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
