# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Spin searches models of the protocol completely: every property holds, and every seeded bug is
found. Each model lists its properties at its top. Caches (which the simulator covers) and payloads
are not modelled.
"""

import re
import subprocess
from pathlib import Path

import pytest
from support.packages import program

pytestmark = pytest.mark.slow

MODELS = Path(__file__).parent
DEPTH = 1_000_000
TIMEOUT_S = 300

BUGS = {
    "slot": ("NO_ENDS", "NO_NONCE", "NO_SEQUENCE"),
    "attach": ("NO_NONCE", "NO_LOCK", "NO_PROOF"),
    "takeover": ("NO_FENCE_OLD", "NO_FENCE_NEW", "READ_FIRST", "NO_LOOK", "SERVE_FIRST"),
    "elect": ("NO_FENCE", "NO_HIGHER", "NO_ADOPT"),
}


@pytest.fixture(scope="module", autouse=True)
def spin() -> None:
    program("spin")


def search(model: str, directory: Path, *macros: str) -> int:
    """Return the number of errors of a search, at most one. The report must show that it was
    complete.
    """

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=directory, text=True, capture_output=True, timeout=TIMEOUT_S, check=True
        )
        return done.stdout

    run("spin", "-a", *(f"-D{macro}" for macro in macros), str(MODELS / f"{model}.pml"))
    run("cc", "-O1", "-w", "-DMEMLIM=1024", "-DSAFETY", "-DNOCLAIM", "-o", "pan", "pan.c")
    report = run("./pan", f"-m{DEPTH}")
    found = re.search(r"errors: (\d+)", report)
    assert found, report
    assert "max search depth too small" not in report, report
    assert int(found[1]) > 0 or "Search not completed" not in report, report
    return int(found[1])


@pytest.mark.parametrize("model", BUGS)
def test_every_property_holds(model: str, tmp_path: Path) -> None:
    assert search(model, tmp_path) == 0


@pytest.mark.parametrize(("model", "bug"), [(m, bug) for m, bugs in BUGS.items() for bug in bugs])
def test_a_planted_bug_is_detected(model: str, bug: str, tmp_path: Path) -> None:
    assert search(model, tmp_path, bug) > 0


def test_a_candidate_is_elected_after_its_competitors_died(tmp_path: Path) -> None:
    assert search("elect", tmp_path, "SURVIVOR") == 0


def test_a_ballot_not_above_those_of_dead_candidates_is_detected(tmp_path: Path) -> None:
    assert search("elect", tmp_path, "SURVIVOR", "NO_GREATER") > 0
