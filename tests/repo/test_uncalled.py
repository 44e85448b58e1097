# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Nothing of ``beluga/`` has tests as its only callers (``scripts/dev/uncalled.py``)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


sys.path.insert(0, str(ROOT / "scripts/dev"))

import uncalled  # noqa: E402


@pytest.mark.long
def test_everything_has_a_caller_outside_tests() -> None:
    assert uncalled.uncalled(ROOT) == []


def test_functions_without_a_caller_are_listed(tmp_path: Path) -> None:
    tree = {
        "beluga/__init__.py": "from beluga.one import alone\n__all__ = ['alone', 'used']\n",
        "beluga/one.py": (
            "import logging\n"
            "def alone(n):\n    return alone(n - 1)\n"
            "def used(): ...\n"
            "def shown(): ...\n"
            "def offered(): ...\n"
            "def by_script(): ...\n"
            "class Described:\n    def known(self): ...\n"
            "@app.command()\ndef command(): ...\n"
            "class Reader(logging.Handler):\n    def emit(self): ...\n"
            "class Kind:\n"
            "    def __len__(self): ...\n"
            "    @property\n    def lonely(self): ...\n"
            "    def by_name(self): ...\n"
            "getattr(Kind(), 'by_name')(Reader, used())\n"
        ),
        "scripts/some": "#!/usr/bin/env python3\nby_script()\n",
        "tests/test_one.py": "alone(), Kind().lonely\n",
        "docs/reference/api.md": "| `beluga.one.offered` | is offered |\n",
        "docs/page.md": "```py\nshown()\n```\n`Described.known` is described.\n",
    }
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert uncalled.uncalled(tmp_path) == ["beluga/one.py:2 alone", "beluga/one.py:17 lonely"]


def test_a_method_is_listed_if_each_use_of_its_name_is_on_another_class(tmp_path: Path) -> None:
    (tmp_path / "beluga").mkdir()
    (tmp_path / "docs/reference").mkdir(parents=True)
    (tmp_path / "docs/reference/api.md").write_text("")
    (tmp_path / "beluga/one.py").write_text(
        "class Base:\n"
        "    def merge(self): ...\n"
        "    def stop(self): ...\n"
        "    def look(self): ...\n"
        "class Sub(Base): ...\n"
        "class Other:\n"
        "    def merge(self): ...\n"
        "    def stop(self): ...\n"
        "    def look(self): ...\n"
        "def use(other: Other, sub: Sub | None, unknown):\n"
        "    other.merge(), sub.stop(), Other().stop(), unknown.look()\n"
        "use(Base)\n"
    )
    assert uncalled.uncalled(tmp_path) == ["beluga/one.py:2 merge"]
