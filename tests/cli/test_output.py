# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The output of commands and their log, and how they read and check files."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from beluga.cli import logs, options, output
from beluga.cli.app import app, cxl_rpc
from beluga.cli.frame import Legend
from beluga.errors import BelugaError, SettingsError

Show = Callable[..., tuple[list[str], str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    """Print a table on a terminal of that width, and return its lines and what is on stderr."""

    def show(names: Any, rows: list[Any], width: int | None = None, **how: Any) -> Any:
        if width:
            monkeypatch.setenv("COLUMNS", str(width))
        else:
            monkeypatch.delenv("COLUMNS", raising=False)
        output.print_table(Legend(dict.fromkeys(names, "")), rows, **how)
        captured = capsys.readouterr()
        return captured.out.splitlines(), captured.err

    return show


def cells_of(lines: list[str]) -> list[list[str]]:
    return [line.replace("┃", " ").replace("│", " ").split() for line in lines if line[0] in "│┃"]


def test_text_columns_are_left_aligned_and_numbers_right_aligned(show: Show) -> None:
    rows = [["a", 1], [None, 123456], ["long", None], ["[bold]a[/bold] [x]", 2]]
    lines, _ = show(["name", "figure"], rows, title="T")
    assert lines[0].startswith("T ")
    cells = [line.split("│")[1:3] for line in lines if line.startswith("│")]
    assert [[name.rstrip(), figure] for name, figure in cells] == [
        [" a", "       1 "],
        [" -", " 123,456 "],
        [" long", "       - "],
        [" [bold]a[/bold] [x]", "       2 "],  # cells are not changed
    ]


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
def test_a_table_fits_a_narrow_terminal(show: Show, width: int) -> None:
    rows = [[f"cell {row}.{at}" for at in range(9)] for row in range(2)]
    lines, _ = show([f"column {number}" for number in range(9)], rows, width)
    assert max(map(len, lines)) <= width
    cells = [line.split() for line in lines if line.startswith("│")]
    assert cells[10] == ["│", "column", "1", "│", "cell", "1.1", "│"]


def test_a_narrow_table_stays_one_table_and_leaves_out_spare_columns_in_order(show: Show) -> None:
    names = ["name", "first", "second", "third"]
    rows = [["a", 10_000_000, 20_000_000, 30_000_000], ["b", 1, 2, None]]
    lines, errors = show(names, rows, 40, spare=("third", "first", "second"))
    assert cells_of(lines) == [names[:3], ["a", "10,000,000", "20,000,000"], ["b", "1", "2"]]
    assert errors == "not shown in 40 columns: third (--wide)\n"
    assert max(map(len, lines)) <= 40
    lines, errors = show(names, rows, 40, spare=("third",), wide=True)
    assert "30,000,000" in "".join(lines) and errors == ""


def test_long_text_is_folded_before_a_column_is_dropped(show: Show) -> None:
    rows = [["many words of a case " * 3, 12_345]]
    lines, errors = show(["case", "figure"], rows, 40, spare=("figure",))
    assert "12,345" in "".join(lines) and errors == ""
    assert max(map(len, lines)) <= 40


def test_a_pipe_has_room_for_every_column(show: Show) -> None:
    lines, _ = show([f"column {n}" for n in range(14)], [["x" * 10] * 14])
    assert max(map(len, lines)) == 14 * 13 + 1
    lines, _ = show(["column"], [["x" * 300]])
    assert max(map(len, lines)) == 200


def test_a_table_may_have_some_columns_of_its_legend_and_no_others(show: Show) -> None:
    assert cells_of(show("abc", [["x", "y"]], columns=["a", "c"])[0])[0] == ["a", "c"]
    with pytest.raises(KeyError, match="the legend lacks d"):
        show("abc", [["x"]], columns=["d"])


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


def test_present_blocks_are_not_requested() -> None:
    options.need("extra", "json", "click")
    with pytest.raises(BelugaError, match=r"needs no_such; pip install 'beluga-kv\[extra\]'"):
        options.need("extra", "json", "no_such")


Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]
log = logging.getLogger("beluga.test")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_of_json_has_time_level_logger_message_and_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.begin(form="json")
    log.warning("%d blocks", 3, extra={"pool": Path("/a")})
    logs.log_message("serving", epoch=1)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("broken")
    first, second, third = lines(capsys)
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {
        "level": "warning",
        "logger": "beluga.test",
        "message": "3 blocks",
        "pool": "/a",
    }
    assert (second["message"], second["level"], second["epoch"]) == ("serving", "info", 1)
    assert "ValueError: why" in third["exception"]


def test_a_log_that_nobody_reads_drops_lines_and_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb", 0) as reader, os.fdopen(writes, "w") as writer:
        monkeypatch.setattr("sys.stderr", writer)
        for number in range(200):
            logs._write(f"{number} " + "x" * 1000)
        assert logs._chosen.dropped > 100
        while logs._chosen.dropped:
            reader.read(1 << 16)
            logs._write("again")
        monkeypatch.undo()
        writer.close()
        text = reader.read()
    assert b"lines were dropped, because nobody read this log\nagain\n" in text


def test_text_logs_have_events_and_command_messages(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin()
    log.warning("3 blocks")
    log.debug("not shown")
    logs.log_message("serving")
    event, output = capsys.readouterr().err.splitlines()
    assert event.endswith(" WARNING beluga.test: 3 blocks")
    assert output == "serving"


@pytest.mark.parametrize(
    ("level", "shown"), [(None, 3), ("debug", 4), ("warning", 2), ("error", 1)]
)
def test_log_levels_are_parsed(
    capsys: pytest.CaptureFixture[str], level: str | None, shown: int
) -> None:
    logs.begin(level)
    for each in (log.debug, log.info, log.warning, log.error):
        each("said")
    assert len(capsys.readouterr().err.splitlines()) == shown


def test_debug_messages_of_libraries_are_omitted(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin("debug")
    logging.getLogger("asyncio").debug("Using selector")
    logging.getLogger("belugas").debug("nor this")
    logging.getLogger("asyncio").warning("but this")
    assert capsys.readouterr().err.count("\n") == 1


def test_repeated_messages_of_one_call_site_are_limited_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    handler = logs._Handler(lambda: now)
    handler.setFormatter(logging.Formatter("%(message)s"))

    def log_lines(count: int) -> None:
        for number in range(count):
            handler.handle(logging.LogRecord("a", 30, "/here", 1, "%d", (number,), None))

    log_lines(logs.BURST + 5)
    handler.handle(logging.LogRecord("a", 30, "/there", 1, "another place", (), None))
    output = capsys.readouterr().err.splitlines()
    assert (len(output), output[-1]) == (logs.BURST + 1, "another place")
    now = logs.WINDOW_S
    handler.handle(logging.LogRecord("a", 30, "/there", 1, "later", (), None))
    assert capsys.readouterr().err.splitlines() == [
        "5 more like this were left out; the last: 24",
        "later",
    ]
    log_lines(logs.BURST + 1)
    handler.close()
    assert "1 more like this" in capsys.readouterr().err.splitlines()[-1]


def test_a_closed_pipe_causes_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedPipe:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(logs.sys, "stderr", ClosedPipe())
    logs.begin()
    log.error("nobody hears it")


def test_the_last_line_of_a_log_may_be_json() -> None:
    assert logs.message_of('{"message": "no"}') == "no"
    for line in ("no", "{}", "[]", "3"):
        assert logs.message_of(line) == line


def test_json_makes_every_line_of_a_server_an_object(pool: list[str], start: Start) -> None:
    child = start("--log-format", "json", "serve", *pool, "--json", "--admin", "0")
    assert child.stdout
    assert child.stderr
    result = [json.loads(child.stdout.readline()) for _ in range(2)]
    assert [each["event"] for each in result] == ["admin", "serving"]
    assert result[0]["url"].startswith("http://127.0.0.1:")
    assert (result[1]["epoch"], result[1]["pid"]) == (1, child.pid)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "")
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["admin", "serving"]


def test_an_error_is_an_event_where_the_log_is_json(run: Run) -> None:
    refused = run("--log-format", "json", "ping", "--pool", "/nowhere")
    assert refused.returncode == 2
    event = json.loads(refused.stderr)
    assert (event["level"], event["message"].startswith("/nowhere")) == ("error", True)


def test_the_environment_selects_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELUGA_LOG_FORMAT", "json")
    assert CliRunner().invoke(app, ["config"]).exit_code == 0
    assert logs._chosen.form == "json"
    monkeypatch.setenv("BELUGA_LOG_LEVEL", "loud")
    refused = CliRunner().invoke(app, ["config"])
    assert isinstance(refused.exception, SettingsError)
    assert "BELUGA_LOG_LEVEL" in str(refused.exception)


@pytest.mark.parametrize("program", [app, cxl_rpc])
def test_every_command_can_log_json(program: Any) -> None:
    leaves = list(program.leaves())
    assert len(leaves) > 3
    lacking = [
        words
        for words in leaves
        if not any("--json" in param.opts for param in program.at(words).params)
    ]
    assert lacking == []
