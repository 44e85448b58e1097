# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The kill loop, short; with the slow tests long enough to pass every crash point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from beluga._ffi import lib

LOOP = Path(__file__).with_name("killloop.py")


def loop(rounds: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, str(LOOP), "--json", "--rounds", str(rounds), "--seed", str(seed)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert process.stdout, process.stderr
    told: dict[str, Any] = json.loads(process.stdout)
    assert told["errors"] == []
    assert process.returncode == 0, process.stderr
    assert told["rounds"] == rounds
    return told


def test_some_deaths_and_stops_do_no_harm() -> None:
    told = loop(24, seed=1)
    assert told["kills"] > 0
    assert told["stops"] > 0
    assert told["blocks_checked"] > 0


@pytest.mark.slow
def test_every_crash_point_is_passed_and_survived() -> None:
    told = loop(2 * lib.bl_crash_point_count() + 30, seed=2)
    assert told["missed"] == []
    assert len(told["hit"]) == told["points"]
    assert told["takeovers"] > 0
