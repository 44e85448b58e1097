# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The list of checks: each is described, and none of them ends the others."""

from __future__ import annotations

import re
from pathlib import Path

from made_machine import made

from beluga.doctor import CHECKS, Check, Machine, UndeterminedError, Verdict, diagnose, run_check

PAGE = Path(__file__).resolve().parents[2] / "docs/operate/operations.md"


def test_the_table_in_the_documents_has_every_check() -> None:
    section = PAGE.read_text().partition("## Is this machine fit?")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)
    assert named == [check.name for check in CHECKS]


def test_names_are_unique() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_a_check_that_fails_is_a_warning(tmp_path: Path) -> None:
    def fails(machine: Machine) -> Verdict:
        raise ZeroDivisionError("one\ntwo")

    found = run_check(Check("broken", fails), made(tmp_path))
    assert (found.name, found.level) == ("broken", "warning")
    assert found.text == "unknown: this check failed (ZeroDivisionError: one two)"
    assert found.fix


def test_an_impossible_check_is_a_warning(tmp_path: Path) -> None:
    def blind(machine: Machine) -> Verdict:
        raise UndeterminedError("it is dark", "switch the light on")

    found = run_check(Check("blind", blind), made(tmp_path))
    assert (found.level, found.text) == ("warning", "unknown: it is dark")
    assert found.fix == "switch the light on"


def test_a_finding_is_one_line_that_a_terminal_can_show(tmp_path: Path) -> None:
    found = run_check(
        Check("loud", lambda machine: Verdict("error", "a\x1b[31m\nb", "c\td\n")), made(tmp_path)
    )
    assert (found.text, found.fix) == ("a [31m b", "c d")


def test_every_check_returns_a_finding_for_this_machine() -> None:
    found = diagnose(Machine())
    assert [each.name for each in found] == [check.name for check in CHECKS]
    assert [each for each in found if "this check failed" in each.text] == []
    assert [each for each in found if bool(each.fix) != (each.level != "ok")] == []
    assert [each for each in found if "#" in each.fix] == [], "a comment would hide what follows"
