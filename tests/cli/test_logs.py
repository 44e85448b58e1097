# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The log of commands: level, format, fields, rate limit, messages of long-running commands."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from beluga.cli import logs, output
from beluga.cli.app import app, cxl_rpc
from beluga.cli.frame import Legend
from beluga.errors import SettingsError

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
    assert refused.returncode == 1
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


def test_table_cells_are_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(Legend(name=""), [["[bold]a[/bold] [x]"]])
    assert "[bold]a[/bold] [x]" in capsys.readouterr().out
