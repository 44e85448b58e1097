# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Logging of commands to stderr: level, format (text or JSON lines), rate limit.

A JSON line has ``time``, ``level``, ``logger``, ``message`` and the fields of the event. Per
WINDOW_S seconds, at most BURST messages from one place in the code are written; suppressed messages
are counted and reported with a later message or at the end.

A log that nobody reads stops no server: its pipe is the bounded queue, and a line for which it has
no room is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import select
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NoReturn, TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
BURST = 20
WINDOW_S = 10.0
_PIPE_BUF = 4096  # bytes that a pipe takes without waiting if it takes any

_log = logging.getLogger("beluga")
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


@dataclass
class _Chosen:
    """The log settings of the program, from flags, the environment and beluga.toml."""

    level: str | None = None
    form: str | None = None
    handler: logging.Handler | None = None  # of the started log
    level_before: int = logging.WARNING  # the root logger's handlers before
    dropped: int = 0  # lines that the reader has not made room for


_chosen = _Chosen()


def choose(level: str | None, form: str | None) -> None:
    """Set level and format of the program. If one of them is given, start logging now."""
    end()
    _chosen.level, _chosen.form = level, form
    if level or form:
        begin(default="warning")


def begin(level: str | None = None, form: str | None = None, *, default: str = "info") -> None:
    """Start logging with this level and format, or else those of the program."""
    end()
    _chosen.form = form or _chosen.form or FORMATS[0]
    handler = _Handler()
    handler.setFormatter(_Json() if _chosen.form == "json" else _Text())
    handler.addFilter(_is_shown)
    root = logging.getLogger()
    root.addHandler(handler)
    _chosen.level_before = root.level
    root.setLevel((level or _chosen.level or default).upper())
    _chosen.handler = handler


def end() -> None:
    """Report suppressed messages, and stop logging."""
    if _chosen.handler is not None:
        logging.getLogger().removeHandler(_chosen.handler)
        logging.getLogger().setLevel(_chosen.level_before)
        _chosen.handler.close()
    _chosen.handler = None


def log_message(text: str, **fields: object) -> None:
    """Report a command's state on stderr, as an event with fields if the log is JSON."""
    if _chosen.handler is None:
        _write(text)
    else:
        _log.info(text, extra={"is_event": True, **fields}, stacklevel=2)


def fail(program: str, text: str, status: int = 1) -> NoReturn:
    """Write the error message of a failed command, and exit with this status."""
    if _chosen.handler is None or _chosen.form != "json":
        end()
        _write(f"{program}: error: {text}")
    else:
        _log.error("%s", text)
        end()
    sys.exit(status)


def message_of(line: str) -> str:
    """Return the message of a line of a log, in either format."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return line


def _write(line: str) -> None:
    """Write a line to stderr, unless that would wait for the reader."""
    if _chosen.dropped:
        line = f"{_chosen.dropped} lines were dropped, because nobody read this log\n{line}"
    try:
        if not _is_pipe(sys.stderr):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
            return
        sys.stderr.flush()
        descriptor, data = sys.stderr.fileno(), f"{line}\n".encode(errors="backslashreplace")
        for start in range(0, len(data), _PIPE_BUF):
            if not select.select([], [descriptor], [], 0)[1]:
                _chosen.dropped += 1
                return
            os.write(descriptor, data[start : start + _PIPE_BUF])
        _chosen.dropped = 0
    except (OSError, ValueError):
        pass  # the reader has closed the pipe


def _is_pipe(stream: TextIO) -> bool:
    """Return whether a stream may have a reader that is slow."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # a stream of its own
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _is_shown(record: logging.LogRecord) -> bool:
    """Filter out debug messages of other packages."""
    own = record.name.partition(".")[0] == "beluga"
    return own or record.levelno >= logging.INFO


class _Text(logging.Formatter):
    """Formats an event with its time and level, and a command's report as plain text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if hasattr(record, "is_event") else super().format(record)


class _Json(logging.Formatter):
    """Formats an event as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        fields = {k: v for k, v in vars(record).items() if k not in _STANDARD and k != "is_event"}
        event: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields | event, default=str)


@dataclass
class _Repeats:
    """A call site that logs."""

    record: logging.LogRecord  # the last message
    began: float
    passed: int = 0
    left_out: int = 0


class _Handler(logging.Handler):
    """Writes events to the current sys.stderr, rate-limited. Tests replace ``clock``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._by_origin: dict[tuple[str, int], _Repeats] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        for key, repeats in list(self._by_origin.items()):
            if now - repeats.began >= WINDOW_S:
                self._sum_up(repeats)
                del self._by_origin[key]
        key = (record.pathname, record.lineno)
        repeats = self._by_origin.setdefault(key, _Repeats(record, now))
        repeats.record = record
        if repeats.passed < BURST:
            repeats.passed += 1
            _write(self.format(record))
        else:
            repeats.left_out += 1

    def close(self) -> None:
        for repeats in self._by_origin.values():
            self._sum_up(repeats)
        self._by_origin.clear()
        super().close()

    def _sum_up(self, repeats: _Repeats) -> None:
        if repeats.left_out == 0:
            return
        last = repeats.record
        text = f"{repeats.left_out} more like this were left out; the last: {last.getMessage()}"
        summary = logging.LogRecord(last.name, last.levelno, "", 0, text, (), None)
        summary.suppressed = repeats.left_out
        _write(self.format(summary))
