# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Nothing of ``beluga/`` has tests as its only callers (``scripts/dev/uncalled.py``)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script() -> Any:
    found = importlib.util.spec_from_file_location("uncalled", ROOT / "scripts/dev/uncalled.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


uncalled = script()


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
