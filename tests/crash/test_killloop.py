# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The kill loop in short; the slow tests are long enough to pass every crash point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.emulation import PATIENCE

from tests.crash import killloop

LOOP = Path(__file__).with_name("killloop.py")


def loop(rounds: int, seed: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, str(LOOP), "--json", f"--rounds={rounds}", f"--seed={seed}", *more]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=280 * PATIENCE, check=False
    )
    assert process.stdout, process.stderr
    message: dict[str, Any] = json.loads(process.stdout)
    assert message["errors"] == []
    assert process.returncode == 0, process.stderr
    assert message["rounds"] >= rounds
    return message


def test_some_deaths_and_stops_do_no_harm() -> None:
    message = loop(24, seed=1)
    assert message["kills"] > 0
    assert message["stops"] > 0
    assert message["blocks_checked"] > 0


@pytest.mark.long
def test_a_death_in_the_middle_of_any_line_does_no_harm() -> None:
    message = loop(len(killloop.walk(lines=True)) + 10, 3, "--lines")
    assert message["missed"] == []
    assert message["kills"] >= message["points"]
    assert {spot.partition("+")[0] for spot in message["hit"]} == {
        *("request.line", "lobby.line", "session.line"),  # of the lobby, of sessions
        *("call.line", "serve.line"),  # of lanes
        *("entry.line", "entry.clear_line", "entry.tomb_line", "extent.line"),
        *("elect.line", "take.line", "register.second_line"),  # candidates, epochs
        *("recover.entry_line", "recover.name_line", "name.line"),
        *("heartbeat.line", "heartbeat.last_line"),
    }


@pytest.mark.slow
def test_every_crash_point_is_passed_and_survived() -> None:
    message = loop(len(killloop.walk()) + 30, seed=2)
    assert message["missed"] == []
    assert len(message["hit"]) == message["points"]
    assert message["takeovers"] > 0
