# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Every column of every table is explained in the help of the command that prints it."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import beluga.cli
from beluga.cli.app import app, cxl_rpc
from beluga.cli.frame import Legend, legends_of

PROGRAMS = {"beluga": app, "cxl-rpc": cxl_rpc}
FOLDER = Path(beluga.cli.__file__).parent


def commands() -> Iterator[tuple[str, Any, tuple[Legend, ...]]]:
    """Yield the name of each command, its program, and the legends of its tables."""
    for name, program in PROGRAMS.items():
        root: Any = program
        for words in root.leaves():
            found = legends_of(root.at(words).callback)
            yield " ".join((name, *words)), program, found


def test_every_legend_belongs_to_a_command() -> None:
    """A table cannot be printed without a legend; a legend without a command explains nothing."""
    shown = [one for *_, legends in commands() for one in legends]
    for module in pkgutil.iter_modules([str(FOLDER)]):
        for name, value in vars(import_module(f"beluga.cli.{module.name}")).items():
            if isinstance(value, Legend):
                assert any(value is one for one in shown), f"{module.name}.{name}"
                assert all(len(text.split()) > 1 for text in value.values()), name


def test_legends_are_defined_apart_from_printing() -> None:
    """They are the module's, where the test above finds them."""
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print_table":
                assert isinstance(node.args[0], ast.Name), f"{path.name}:{node.lineno}"
                assert node.args[0].id.isupper() or path.name == "block.py", path.name


@pytest.mark.parametrize("name", [name for name, _, legends in commands() if legends])
def test_the_help_explains_each_column(name: str) -> None:
    program, *words = name.split()
    legends = next(found for one, _, found in commands() if one == name)
    text = CliRunner().invoke(PROGRAMS[program], [*words, "--help"]).stdout
    shown = " ".join(text.split())
    for legend in legends:
        for column, meaning in legend.items():
            assert re.sub(r"\s+", " ", f"{column}: {meaning}") in shown


def test_columns_of_truncated_tables_are_explained_too() -> None:
    """Live views and single lines: top and trace; names and values: stat, replay, pool check."""
    explained = {name for name, _, legends in commands() if legends}
    wanted = {"top", "trace", "stat", "replay", "pool check", "ls", "quota", "bench", "simulate"}
    assert {f"beluga {name}" for name in wanted} <= explained
