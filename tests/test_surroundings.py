# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tests pass wherever they are started: under nohup, in a background, in an odd environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.emulation import long

ROOT = Path(__file__).resolve().parent.parent
STOPPED = "tests/replay/test_replay.py::test_a_stopped_replay_leaves_nothing"
COMMANDS = "tests/cli/test_block_command.py"


def run_tests(selection: list[str], before: str, environment: dict[str, str], folder: Path) -> None:
    command = f'{before}; exec "$0" -m pytest -q -p no:cacheprovider "$@"'
    ended = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, *selection, "--basetemp", folder / "with space"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout


@pytest.mark.long
def test_signals_may_be_ignored(tmp_path: Path) -> None:
    """As nohup and background jobs of a shell do."""
    selection = [f"{STOPPED}[1-129]", f"{STOPPED}[2-130]"]
    run_tests(selection, "trap '' HUP INT", dict(os.environ), tmp_path)


@pytest.mark.slow
def test_commands_work_in_an_empty_environment(tmp_path: Path) -> None:
    """No HOME, no terminal, no locale, a strict umask, closed stdin."""
    bare = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    run_tests([COMMANDS], "umask 077; exec <&-", bare, tmp_path)


@pytest.mark.parametrize(("first", "status"), [("assert False", 1), long("pass", 2)])
def test_a_failure_before_an_interruption_counts(first: str, status: int, tmp_path: Path) -> None:
    """``scripts/check`` interrupts long steps, and treats status 1 as a failure."""
    tests = tmp_path / "test_it.py"
    tests.write_text(f"def test_a(): {first}\ndef test_b(): raise KeyboardInterrupt\n")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", tmp_path, tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == status, ended.stdout
