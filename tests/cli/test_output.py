# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The output of commands, and how they read and check files, in this process."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from beluga.cli import options, output
from beluga.cli.frame import Legend
from beluga.errors import BelugaError


def test_text_columns_are_left_aligned_and_numbers_right_aligned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    legend = Legend(name="", figure="")
    output.print_table(legend, [["a", 1], [None, 123456], ["long", None]], title="T")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("T ")
    cells = [line.split("│")[1:3] for line in lines if line.startswith("│")]
    assert cells == [[" a    ", "       1 "], [" -    ", " 123,456 "], [" long ", "       - "]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.12345, "0.123"),
        (-99.96, "-100"),
        (99.44, "99.4"),
        (100.0, "100"),
        (-12345.6, "-12,346"),
        (1234, "1,234"),
        (7, "7"),
        ("1.23456", "1.23456"),
    ],
)
def test_numbers_have_three_significant_digits(value: object, text: str) -> None:
    assert output._cell(value) == text


@pytest.mark.parametrize("width", [40, 80])
def test_a_table_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    columns = Legend({f"column {number}": "" for number in range(9)})
    output.print_table(columns, [[f"cell {row}.{at}" for at in range(9)] for row in range(2)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    cells = [line.split() for line in lines if line.startswith("│")]
    assert cells[10] == ["│", "column", "1", "│", "cell", "1.1", "│"]


def lines_of_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line[0] in "│┃"]


def test_a_narrow_table_stays_one_table_and_leaves_out_spare_columns_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    legend = Legend(name="", first="", second="", third="")
    rows = [["a", 10_000_000, 20_000_000, 30_000_000], ["b", 1, 2, None]]
    output.print_table(legend, rows, spare=("third", "first", "second"))
    captured = capsys.readouterr()
    assert [
        line.replace("┃", " ").replace("│", " ").split() for line in lines_of_rows(captured.out)
    ] == [
        ["name", "first", "second"],
        ["a", "10,000,000", "20,000,000"],
        ["b", "1", "2"],
    ]
    assert captured.err == "not shown in 40 columns: third (--wide)\n"
    assert max(map(len, captured.out.splitlines())) <= 40
    output.print_table(legend, rows, spare=("third",), wide=True)
    captured = capsys.readouterr()
    assert "30,000,000" in captured.out and captured.err == ""


def test_long_text_is_folded_before_a_column_is_dropped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    legend = Legend(case="", figure="")
    output.print_table(legend, [["many words of a case " * 3, 12_345]], spare=("figure",))
    captured = capsys.readouterr()
    assert "12,345" in captured.out and captured.err == ""
    assert max(map(len, captured.out.splitlines())) <= 40


def test_a_pipe_has_room_for_every_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    output.print_table(Legend({f"column {n}": "" for n in range(14)}), [["x" * 10] * 14])
    assert max(map(len, capsys.readouterr().out.splitlines())) == 14 * 13 + 1
    output.print_table(Legend(column=""), [["x" * 300]])
    assert max(map(len, capsys.readouterr().out.splitlines())) == 200


def test_a_table_may_have_some_columns_of_its_legend_and_no_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    legend = Legend(a="", b="", c="")
    output.print_table(legend, [["x", "y"]], columns=["a", "c"])
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1] == [
        "┃",
        "a",
        "┃",
        "c",
        "┃",
    ]
    with pytest.raises(KeyError, match="the legend lacks d"):
        output.print_table(legend, [["x"]], columns=["d"])


def test_each_fact_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_facts({"one": 1, "longer": 2.5})
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert lines == ["│ one    │   1 │", "│ longer │ 2.5 │"]


def test_json_and_text_are_flushed_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of the pipe gets output before the command ends."""
    for name in ("stdout", "stderr"):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, write_through=False))
        output.print_json({"a": Path("b")}) if name == "stdout" else output.print_note("word")
        text = raw.getvalue().decode()
        assert text == ('{\n  "a": "b"\n}\n' if name == "stdout" else "word\n")


def test_a_progress_bar_appears_at_its_first_update_and_is_removed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with output.progress("copying") as advance:
        assert capsys.readouterr().err == ""
        advance(1, 4)
        advance(4, 4)
    shown = capsys.readouterr()
    assert "copying" in shown.err and "100%" in shown.err
    assert shown.out == ""
    with output.progress("copying"):
        pass
    with output.progress("copying", shown=False) as advance:
        advance(1, 4)
    assert capsys.readouterr().err == ""


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert options.read_at_most(5, tmp_path / "file", "it") == b"12345"
    with pytest.raises(BelugaError, match="file has more than 4 bytes, the limit for it"):
        options.read_at_most(4, tmp_path / "file", "it")


def test_a_dash_is_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"12345678")))
    with pytest.raises(BelugaError, match="- has more than 4 bytes, the limit for it"):
        options.read_at_most(4, Path("-"), "it")
    # no more was read than the limit and one byte
    assert sys.stdin.buffer.read() == b"678"


def test_checking_the_output_path_changes_no_file(tmp_path: Path) -> None:
    options.check_output(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_bytes(b"kept")
    options.check_output(tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"kept"
    with pytest.raises(IsADirectoryError):
        options.check_output(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    options.check_output(tmp_path / "pipe")  # the command does not wait for a reader


def test_an_invalid_size_is_a_usage_error() -> None:
    assert options.size("2K") == 2048
    with pytest.raises(click.BadParameter, match="'x' is not a size"):
        options.size("x")


def test_present_blocks_are_not_requested() -> None:
    options.need("extra", "json", "click")
    with pytest.raises(BelugaError, match=r"needs no_such; pip install 'beluga-kv\[extra\]'"):
        options.need("extra", "json", "no_such")


def test_json_output_can_be_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json([{"a": 1.5, "b": None}])
    assert json.loads(capsys.readouterr().out) == [{"a": 1.5, "b": None}]
