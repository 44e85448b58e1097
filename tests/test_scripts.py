# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``scripts/check`` with stand-ins for all it calls: what it runs, says, and ends with.

Also that ``scripts/test-aarch64`` runs, or leaves out with a reason, every test.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CALLED = sorted(set(re.findall(r"scripts/([\w-]+)", (ROOT / "scripts/check").read_text())))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in which nothing does anything."""
    (tmp_path / "scripts").mkdir()
    for name in CALLED:
        stand_in(tmp_path / "scripts" / name)
    shutil.copy(ROOT / "scripts/check", tmp_path / "scripts/check")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    stand_in(tmp_path / ".venv/bin/python")
    stand_in(tmp_path / ".venv/bin/beluga")
    stand_in(tmp_path / "scripts/test", "2 passed")
    return tmp_path


def stand_in(path: Path, says: str = "", status: int = 0) -> None:
    last = f"echo {says}\n" if says else ""
    path.write_text(f'#!/bin/sh\necho "ran {path.name} $*"\n{last}exit {status}\n')
    path.chmod(0o755)


def check(tree: Path, *arguments: str, budget_s: int = 3900) -> tuple[int, list[str]]:
    script = tree / "scripts/check"
    text = re.sub(r"budget_s=\d+", f"budget_s={budget_s}", script.read_text())
    script.write_text(text)
    ended = subprocess.run(
        [script, *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return ended.returncode, ended.stdout.splitlines()


def test_all_that_passes_ends_with_the_summary_of_the_tests(tree: Path) -> None:
    status, lines = check(tree, "--ci", "-k", "one")
    assert (status, lines[-2:]) == (0, ["ran test -k one", "2 passed"])
    assert [line for line in lines if "left out" in line or "failed" in line] == []
    for name in ("test-pythons", "test-packages", "mutants", "soak", "fuzz", "setup-adapters"):
        assert any(line.startswith(f"ran {name}") for line in lines), name


def test_a_failure_is_said_and_is_the_status(tree: Path) -> None:
    stand_in(tree / "scripts/fuzz", status=1)
    stand_in(tree / "scripts/test-pythons", status=77)
    stand_in(tree / "scripts/mutants", status=124)
    status, lines = check(tree, "--ci")
    assert (status, lines[-1]) == (1, "2 passed")
    assert "== failed: fuzz" in lines
    assert "== lacking: pythons" in lines
    assert "== cut off: mutants" in lines


def test_failed_tests_are_the_status(tree: Path) -> None:
    stand_in(tree / "scripts/test", "1 failed", status=1)
    assert check(tree)[0] == 1


def test_what_does_not_fit_is_left_out_and_named(tree: Path) -> None:
    status, lines = check(tree, "--ci", budget_s=1200 + 360)
    assert (status, lines[-1]) == (0, "2 passed")
    assert "== left out: readme hosts aarch64 mutants adapters engines slow" in lines
    assert any(line.startswith("ran soak") for line in lines)


def test_all_has_no_limit(tree: Path) -> None:
    status, lines = check(tree, "--all", budget_s=0)
    assert status == 0
    assert not any("left out" in line for line in lines)


def test_a_newcomer_waits_for_no_long_step(tree: Path) -> None:
    _, lines = check(tree)
    assert "ran docs " in lines
    assert not any(line.startswith(("ran soak", "ran mutants", "ran test-")) for line in lines)


def test_every_test_runs_for_aarch64_or_is_left_out_with_a_reason() -> None:
    script = (ROOT / "scripts/test-aarch64").read_text()
    parts = re.search(r"^quick=\((.*?)\)$.*<<'END'\n(.*?)^END$", script, re.DOTALL | re.MULTILINE)
    assert parts
    quick = parts[1].split()
    left_out = [name for line in parts[2].splitlines() for name in line.split(": ")[-1].split()]
    tests = ROOT / "tests"
    for path in tests.rglob("test_*.py"):
        name = str(path.relative_to(tests))
        of = [one for one in quick + left_out if name == one or name.startswith(f"{one}/")]
        assert len(of) == 1, f"{name} is in {of}: scripts/test-aarch64 names each test once"
    assert [one for one in quick + left_out if not (tests / one).exists()] == []
