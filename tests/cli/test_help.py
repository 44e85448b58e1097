# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Help and tables fit the terminal; no option name and no value is cut."""

from __future__ import annotations

import re
from typing import Any

import pytest
from click.testing import CliRunner

from beluga.cli import output, trace
from beluga.cli.app import app, cxl_rpc
from beluga.router import POLICIES, costs
from beluga.rpc import method_names

PROGRAMS = {"beluga": app, "cxl-rpc": cxl_rpc}
LEAVES = [(name, words) for name, program in PROGRAMS.items() for words in [(), *program.leaves()]]


def help_of(name: str, words: tuple[str, ...]) -> str:
    shown = CliRunner().invoke(PROGRAMS[name], [*words, "--help"], prog_name=name)
    assert shown.exit_code == 0
    return shown.stdout


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize(("name", "words"), LEAVES, ids=str)
def test_help_fits_and_names_every_option_in_full(
    name: str, words: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_of(name, words)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    command: Any = PROGRAMS[name].at(words)
    for option in command.params:
        if option.param_type_name == "option" and not option.hidden:
            for one in (*option.opts, *option.secondary_opts):
                assert re.search(rf"(?<![\w-]){one}(?![\w-])", text), one


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("command", ["gateway", "simulate", "size"])
def test_help_cuts_no_value(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_of("beluga", (command,))
    for value in [*costs.MODELS, *(() if command == "size" else POLICIES)]:
        assert value in text


@pytest.mark.parametrize("columns", [40, 60])
def test_help_in_a_pipe_respects_columns(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    legend = output.Legend({"name": "a name", "where it is, if anywhere": "a place"})
    row = ["x" * 50, "a place of some length"]
    monkeypatch.setenv("COLUMNS", str(columns))
    output.print_table(legend, [row])
    output.print_facts({"a name of some length, which is longer than a line is": 1})
    output.print_row(" ".join(["word"] * 20))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)
    assert "".join(lines).count("x") == 50
    monkeypatch.delenv("COLUMNS")
    output.print_table(legend, [row])
    assert max(map(len, capsys.readouterr().out.splitlines())) > columns


def test_the_columns_of_a_trace_are_as_wide_as_their_values() -> None:
    for method in method_names():
        row = trace._ROW.format(
            "03:31:40.353149", "63:4194304:999", method, 4096, "99,999.9", 1, ""
        )
        assert row.index(method) == trace._HEADING.index("method")
        assert len(row.rstrip() + " unfinished") <= 80
