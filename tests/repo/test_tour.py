# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""docs/understand/tour.md names files and functions that exist, each function in a file of its
row.
"""

from __future__ import annotations

import re

from support.shown import ROOT

PAGE = (ROOT / "docs/understand/tour.md").read_text()
ROWS = re.findall(r"^\| \d+ \| .* \| (\[.*\)) \| (`.*`) \|$", PAGE, re.MULTILINE)


def has(text: str, name: str) -> bool:
    """Whether this function is defined or declared in a source of Python or C."""
    return re.search(rf"\bdef {name}\(|^\w[\w *]*\b{name}\(", text, re.MULTILINE) is not None


def test_each_row_names_a_function_of_its_files() -> None:
    assert len(ROWS) >= 25
    wrong = []
    for files, functions in ROWS:
        paths = re.findall(r"\]\(\.\./\.\./([^)]+)\)", files)
        text = "\n".join((ROOT / path).read_text() for path in paths)
        wrong += [
            (paths, name) for name in re.findall(r"`(\w+)`", functions) if not has(text, name)
        ]
    assert wrong == []


def test_functions_in_the_text_exist() -> None:
    named = set(re.findall(r"`(bl_\w+)`", PAGE))
    sources = "\n".join(path.read_text() for path in (ROOT / "csrc").rglob("*.[ch]"))
    assert len(named) >= 20
    assert [name for name in sorted(named) if not has(sources, name)] == []
    assert not has(sources, "bl_kv_fly")
