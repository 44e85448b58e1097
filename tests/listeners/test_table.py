# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""docs/operate/listeners.md has the table of ``table.py``, and each cell a test or a reason."""

from __future__ import annotations

import ast
from pathlib import Path

from table import LISTENERS, TABLE, page_table

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/operate/listeners.md"


def test_the_page_has_the_table() -> None:
    assert page_table() in PAGE.read_text()


def test_every_cell_has_a_test_that_exists_or_a_reason() -> None:
    for cells in TABLE.values():
        assert len(cells) == len(LISTENERS)
        for cell in cells:
            assert cell.text
            if cell.test:
                file, _, name = cell.test.partition("::")
                tree = ast.parse((HERE / file).read_text())
                names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
                assert name in names, cell.test


def test_every_test_of_an_attack_is_in_the_table() -> None:
    named = {cell.test for cells in TABLE.values() for cell in cells}
    for file in ("test_slow_clients.py", "test_sizes.py"):
        for node in ast.parse((HERE / file).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert f"{file}::{node.name}" in named
