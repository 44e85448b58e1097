# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga.toml``: defaults for the options of every command, with lower precedence than flags and
the environment.

Example: the file has ``host = 3`` and a table ``[serve]`` with ``quota-calls = 1000``. Then every
command with an option ``--host N`` has the default 3, and ``beluga serve`` has ``--quota-calls
1000``. The file becomes the parser's default map, so commands need no code for it.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from beluga import config
from beluga.cli import lazy
from beluga.cli.options import HOST_HELP, Host, LogFormat, LogLevel, PoolPaths
from beluga.errors import SettingsError
from beluga.text import decode_text

# Options that confirm or declare something for a single run.
ONCE = frozenset(
    (
        "config",
        "create",
        "declare_gone",
        "detach",
        "force",
        "forget_tier",
        "help",
        "install_completion",
        "repair",
        "show_completion",
        "version",
        "yes",
    )
)
SHARED = ("pool", "host", "log_level", "log_format")  # keys above all tables
_WANTED = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}
_TEXT = ((str,), "text in quotes")
_SIZE = ((int, str), "a size, such as 4096 or '64M'")
_SIZE_MAX = 1 << 20  # bytes of a settings file


@dataclass(frozen=True)
class Setting:
    """One value of the file. An empty table applies to all commands."""

    table: str
    key: str
    value: object
    unused: str  # the flag or variable that overrides it, or ""


@dataclass(frozen=True)
class FileSettings:
    """The content of a file. ``defaults`` is the parser's default map."""

    path: Path | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Setting, ...] = ()


def find(named: Path | None) -> Path | None:
    """Return the given file, else that of BELUGA_CONFIG, the user or the machine, if any.

    The current folder is not searched, so a command behaves the same in every folder.
    """
    chosen = named or config.settings_file()
    return chosen or next((path for path in config.settings_places() if _exists(path)), None)


def load(
    path: Path | None, context: typer.Context, program: str, above: Mapping[str, str]
) -> FileSettings:
    """Read the file for the context's program. Raises SettingsError.

    ``above`` maps overridden keys to their flag or variable.
    """
    if path is None:
        return FileSettings()
    return _Reader(path, context, program, above).settings()


def tables(root: Any, program: str) -> dict[str, tuple[str, ...]]:
    """Return the words of each command by the name of its table.

    ``beluga pool create`` has ``[pool-create]``, because ``pool`` itself is the list of devices.
    """
    prefix = "" if program == "beluga" else f"{program}-"
    return {prefix + "-".join(words): words for words in lazy.leaves(root)}


def options(command: Any) -> dict[str, Any]:
    """Return a command's options that a file may set, by key."""
    found = {key_of(one): one for one in command.params if one.param_type_name == "option"}
    return {key: one for key, one in found.items() if key not in ONCE}


def key_of(option: Any) -> str:
    """Return ``quota_calls`` for ``--quota-calls``."""
    return max(option.opts, key=len).lstrip("-").replace("-", "_")  # type: ignore[no-any-return]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # another user's home
        return False


class _Reader:
    """Reads one file. Its errors include the line number."""

    def __init__(
        self, path: Path, context: typer.Context, program: str, above: Mapping[str, str]
    ) -> None:
        self._path, self._context, self._above = path, context, above
        self._root: Any = context.command
        self._program = program
        self._tables = tables(self._root, program)
        self._text = self._read()
        self._rows: list[Setting] = []
        self._defaults: dict[str, Any] = {}

    def settings(self) -> FileSettings:
        """Check every value of the file."""
        shared: dict[str, Any] = {}
        for name, value in self._parsed().items():
            key = name.replace("-", "_")
            if isinstance(value, dict):
                self._table(name, value)
            elif key in SHARED:
                self._share(shared, name, key, value)
            elif name.replace("_", "-") in self._tables:
                raise self._wrong("", name, f"is a table; write [{name}] above its settings")
            else:
                known = [*SHARED, *(f"[{table}]" for table in self._tables)]
                raise self._wrong("", name, f"is not a setting of all commands{_meant(key, known)}")
        return FileSettings(self._path, shared, self._defaults, tuple(self._rows))

    def _read(self) -> str:
        try:
            with self._path.open("rb") as file:
                data = file.read(_SIZE_MAX + 1)
        except OSError as error:
            raise SettingsError(f"{self._path}: {error.strerror}") from None
        if len(data) > _SIZE_MAX:
            raise SettingsError(f"{self._path} has more than {_SIZE_MAX} bytes; make it smaller")
        try:
            return decode_text(data)
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise SettingsError(f"{self._path}, line {line}: the text is not UTF-8") from None

    def _parsed(self) -> dict[str, Any]:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            parsed: dict[str, Any] = tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{self._path}: {error}") from None
        except RecursionError:
            raise SettingsError(
                f"{self._path}: its lists are nested too deeply; make them flat"
            ) from None
        return parsed

    def _share(self, shared: dict[str, Any], name: str, key: str, value: object) -> None:
        """Check a key above all tables, and make it the default of each command with that
        option.
        """
        self._unique("", name, key)
        command = _with_shared_options()
        shared[key] = self._checked("", name, command, options(command)[key], value)
        self._rows.append(Setting("", key, shared[key], self._above.get(key, "")))
        if key == "host":  # the other keys also apply to commands without that option
            for words in self._running():
                option = options(lazy.command_at(self._root, words)).get(key)
                # --host of the gateway is an address
                if option is not None and option.help == HOST_HELP:
                    self._put(words, option, shared[key], over=False)

    def _running(self) -> Iterator[tuple[str, ...]]:
        """Yield the words of each command that this run may execute."""
        invoked = self._context.invoked_subcommand
        return (words for words in lazy.leaves(self._root) if invoked in (None, words[0]))

    def _table(self, name: str, values: Mapping[str, object]) -> None:
        table = name.replace("_", "-")
        if table not in self._tables:
            self._refuse_table(name, table)
            return
        words = self._tables[table]
        command = lazy.command_at(self._root, words)
        known = options(command)
        for given, value in values.items():
            key = given.replace("-", "_")
            if key in ONCE:
                text = "applies to one run only; give it on the command line"
                raise self._wrong(name, given, text)
            if key not in known:
                raise self._wrong(
                    name, given, f"is not an option of this command{_meant(key, known)}"
                )
            self._unique(name, given, key)
            checked = self._checked(name, given, command, known[key], value)
            unused = self._above.get(key, "")
            self._rows.append(Setting(table, key, checked, unused))
            if not unused:
                self._put(words, known[key], checked, over=True)

    def _refuse_table(self, name: str, table: str) -> None:
        """Raise SettingsError unless the table belongs to the other program."""
        if (self._program == "beluga") == table.startswith("cxl-rpc-"):
            return
        if self._program != "beluga":
            raise self._wrong(name, "", f"is not a command of {self._program}")
        inside = [f"[{one}]" for one in self._tables if one.startswith(f"{table}-")]
        if inside:
            raise self._wrong(name, "", f"is a group of commands; write {', '.join(inside)}")
        raise self._wrong(name, "", f"is not a command{_meant(table, self._tables)}")

    def _unique(self, table: str, given: str, key: str) -> None:
        if any((row.table, row.key) == (table.replace("_", "-"), key) for row in self._rows):
            raise self._wrong(table, given, "is given twice, with - and with _")

    def _put(self, words: tuple[str, ...], option: Any, value: object, *, over: bool) -> None:
        """Set a default of a command; ``over`` replaces a shared default."""
        inside = self._defaults
        for word in words:
            inside = inside.setdefault(word, {})
        if over or option.name not in inside:
            inside[option.name] = value

    def _checked(self, table: str, key: str, command: Any, option: Any, value: object) -> object:
        """Return a value that is valid for the option. A list of one item may be given without
        brackets.
        """
        if option.multiple and not isinstance(value, list):
            value = [value]
        kinds, wanted = _kinds(command, option)
        for item in value if option.multiple and isinstance(value, list) else [value]:
            if not isinstance(item, kinds) or (isinstance(item, bool) and bool not in kinds):
                raise self._wrong(table, key, f"{_show(item)} is not {wanted}")
        try:
            option.process_value(self._context, value)
        except typer.BadParameter as error:
            raise self._wrong(table, key, error.message.rstrip(".")) from None
        return value

    def _wrong(self, table: str, key: str, text: str) -> SettingsError:
        line = _line_of(self._text, table, key)
        place = f"{self._path}, line {line}" if line else str(self._path)
        what = " ".join([*([f"[{table}]"] if table else []), *([key] if key else [])])
        return SettingsError(f"{place}: {what}: {text}")


def _with_shared_options() -> Any:
    """Return the parser of a command that has the options above all tables."""

    def shared(
        pool: PoolPaths = None,
        host: Host = None,
        log_level: LogLevel = None,
        log_format: LogFormat = None,
    ) -> None: ...

    program = typer.Typer(add_completion=False)
    program.command()(shared)
    return typer.main.get_command(program)


def _kinds(command: Any, option: Any) -> tuple[tuple[type, ...], str]:
    """Return the TOML types that an option accepts, and their description."""
    hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    hint, *more = typing.get_args(hints[option.name])
    inside = {hint, *typing.get_args(hint)}
    inside |= {kind for each in inside for kind in typing.get_args(each)}
    kind = next((kind for kind in (bool, int, float) if kind in inside), str)
    if kind is int and any(getattr(one, "parser", None) for one in more):
        return _SIZE
    return _WANTED.get(kind, _TEXT)


def _meant(name: str, known: Any) -> str:
    import difflib  # slow to import, and needed only for errors

    plain = {str(one).strip("[]").replace("-", "_"): str(one) for one in known}
    close = difflib.get_close_matches(name.replace("-", "_"), plain, 1)
    return f"; did you mean {plain[close[0]]}?" if close else ""


def _show(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a table"
    return json.dumps(value, default=str, ensure_ascii=False)


def _line_of(text: str, table: str, key: str) -> int | None:
    """Return the number of the line that sets a key (or starts the table), or None."""
    here = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*[\"']?([\w-]+)[\"']?\s*\]", line):
            here = header[1]
            if not key and here == table:
                return number
        elif here == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return None
