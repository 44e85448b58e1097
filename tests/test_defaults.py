# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What calls and commands do by default stays as it is, unless somebody means to change it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_a_default_is_changed_on_purpose_or_not_at_all() -> None:
    """``defaults.txt`` is what users have: modules, and the lines below them.

    To change one: say so in CHANGELOG.md, and ``python tests/defaults.py >tests/defaults.txt``.
    What has no line there may be anything; the same command adds it.
    """
    done = subprocess.run(
        [sys.executable, HERE / "defaults.py"], capture_output=True, text=True, check=True
    )
    found = set(done.stdout.splitlines())
    recorded = (HERE / "defaults.txt").read_text().splitlines()
    changed, module = [], ""
    for line in recorded:
        if " " not in line:
            module = line
        elif module in found and line not in found:
            changed.append(line)
    assert len(found) > len(recorded) // 2
    assert not changed, f"now it is: {now(changed, found)}"


def now(changed: list[str], found: set[str]) -> list[str]:
    """What the names of these lines have instead."""
    names = {line.split()[0] for line in changed if line}
    return sorted(line for line in found if line and line.split()[0] in names)
