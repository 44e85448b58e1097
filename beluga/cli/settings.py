# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga.toml``: defaults for the options of every command, with lower precedence than flags and
the environment. The command ``beluga config`` shows them.

Example: the file has ``host = 3`` and a table ``[serve]`` with ``quota-calls = 1000``. Then every
command with an option ``--host N`` has the default 3, and ``beluga serve`` has ``--quota-calls
1000``. The file becomes click's default map, so commands need no code for it.
"""

from __future__ import annotations

import json as json_library
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from beluga import config
from beluga.cli.frame import Legend, explains, parameters_of, suggest
from beluga.cli.options import Host, Json, LogFormat, LogLevel, PoolPaths
from beluga.cli.output import print_json, print_note, print_table
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
        "repair",
        "show_completion",
        "version",
        "yes",
    )
)
_SIZE_MAX = 1 << 20  # bytes of a settings file


@dataclass(frozen=True)
class FileSetting:
    """One value of the file. An empty table applies to all commands."""

    table: str
    key: str
    value: object
    unused: str  # the flag or variable that overrides it, or ""


@dataclass(frozen=True)
class FileSettings:
    """The content of a file. ``defaults`` is click's default map."""

    path: Path | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[FileSetting, ...] = ()


def _shared(
    pool: PoolPaths = None,
    host: Host = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Declare the keys above all tables, with the types of these options."""


def find(named: Path | None) -> Path | None:
    """Return the given file, else that of BELUGA_CONFIG, the user or the machine, if any.

    The current folder is not searched, so a command behaves the same in every folder.
    """
    chosen = named or config.settings_file()
    return chosen or next((path for path in config.settings_paths() if _exists(path)), None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # another user's home
        return False


def tables(root: Any) -> dict[str, tuple[str, ...]]:
    """Return the words of each command by the name of its table.

    ``beluga pool create`` has ``[pool-create]``, because ``pool`` itself is the list of devices.
    """
    prefix = "" if root.name == "beluga" else f"{root.name}-"
    return {prefix + "-".join(words): words for words in root.leaves()}


def options(params: list[Any]) -> dict[str, Any]:
    """Return the options that a file may set, by key: ``quota_calls`` for ``--quota-calls``."""
    by_key = {key_of(param): param for param in params if param.param_type_name == "option"}
    return {key: option for key, option in by_key.items() if key not in ONCE}


def key_of(option: Any) -> str:
    """Return the key of an option in a file."""
    return max(option.opts, key=len).lstrip("-").replace("-", "_")  # type: ignore[no-any-return]


def load(path: Path | None, context: click.Context, above: Mapping[str, str]) -> FileSettings:
    """Read the file for the context's program, and check every value. Raises SettingsError.

    ``above`` maps overridden keys to their flag or variable.
    """
    if path is None:
        return FileSettings()
    try:
        return _Reader(context, above).settings(path, _parsed(path))
    except _WrongSettingError as error:
        what, text = error.args
        joint = " " if text.startswith("is ") else ": "
        raise SettingsError(f"{path}: {what}{joint}{text}") from None


class _WrongSettingError(Exception):
    """A setting, and what is wrong with it."""


def _parsed(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with path.open("rb") as file:
            data = file.read(_SIZE_MAX + 1)
        if len(data) > _SIZE_MAX:
            raise SettingsError(f"{path} has more than {_SIZE_MAX} bytes; make it smaller")
        parsed: dict[str, Any] = tomllib.loads(decode_text(data))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; name a file of settings") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{path}, line {line}: the text is not UTF-8; convert it") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML ({error}); correct it there") from None
    except RecursionError:
        raise SettingsError(f"{path}: its lists are nested too deeply; make them flat") from None
    return parsed


class _Reader:
    def __init__(self, context: click.Context, above: Mapping[str, str]) -> None:
        self._context, self._above = context, above
        self._root: Any = context.command
        self._tables = tables(self._root)
        self._rows: dict[tuple[str, str], FileSetting] = {}
        self._defaults: dict[str, Any] = {}

    def settings(self, path: Path, parsed: Mapping[str, Any]) -> FileSettings:
        of_all = options(parameters_of(_shared))
        for name, value in parsed.items():
            table = name.replace("_", "-")
            if name == "copy":
                self._read_copies(value)
            elif isinstance(value, dict):
                self._read_table(name, table, value)
            elif table in self._tables:
                raise _WrongSettingError(name, f"is a table; write [{name}] above its settings")
            elif name.replace("-", "_") not in of_all:
                names = [*of_all, *(f"[{table}]" for table in self._tables)]
                text = f"is not a setting of all commands{suggest(name, names) or self._help()}"
                raise _WrongSettingError(name, text)
            else:
                self._check("", name, name, of_all, value)
        shared = {key: row.value for (table, key), row in self._rows.items() if not table}
        if "host" in shared:  # the other keys also apply to commands without that option
            self._share_host(shared["host"])
        return FileSettings(path, shared, self._defaults, tuple(self._rows.values()))

    def _read_table(self, name: str, table: str, values: Mapping[str, object]) -> None:
        if table not in self._tables:
            if (self._root.name == "beluga") != table.startswith("cxl-rpc-"):
                raise _WrongSettingError(f"[{table}]", self._no_table(table))
            return  # of the other program
        by_key = options(self._root.at(self._tables[table]).params)
        for setting, value in values.items():
            what, key = f"[{name}] {setting}", setting.replace("-", "_")
            if key in ONCE:
                raise _WrongSettingError(
                    what, "applies to one run only; give it on the command line"
                )
            if key not in by_key:
                text = (
                    f"is not an option of this command{suggest(key, by_key) or self._help(table)}"
                )
                raise _WrongSettingError(what, text)
            row = self._check(table, setting, what, by_key, value)
            if not row.unused:
                self._inside(self._tables[table])[by_key[key].name] = row.value

    def _help(self, table: str = "") -> str:
        words = " ".join((self._root.name, *self._tables.get(table, ())))
        return f"; remove it, or see '{words} --help'"

    def _no_table(self, table: str) -> str:
        if self._root.name != "beluga":
            return f"is not a command of {self._root.name}; remove it, or correct its name"
        inside = [f"[{name}]" for name in self._tables if name.startswith(f"{table}-")]
        if inside:
            return f"is a group of commands; write {', '.join(inside)}"
        return f"is not a command{suggest(table, self._tables) or self._help()}"

    def _read_copies(self, values: object) -> None:
        """Check the sizes of copies, which caches read (:func:`beluga.config.copy_settings`)."""
        from beluga.transfer import copy_setting_names

        if not isinstance(values, dict):
            raise _WrongSettingError("copy", "is a table; write [copy] above its settings")
        names = copy_setting_names()
        for name, value in values.items():
            key = name.replace("_", "-")
            if key not in names:
                text = f"is not a size of copies{suggest(key, names)}"
                raise _WrongSettingError(f"[copy] {name}", text)
            if type(value) is not int or value < 0:
                raise _WrongSettingError(f"[copy] {name}", f"is {value!r}; give a number of bytes")
            self._rows["copy", key] = FileSetting("copy", key, value, "")

    def _check(
        self, table: str, name: str, what: str, by_key: Mapping[str, Any], value: object
    ) -> FileSetting:
        """Check a value and record it. A list of one item may be given without brackets."""
        key = name.replace("-", "_")
        option = by_key[key]
        if (table, key) in self._rows:
            raise _WrongSettingError(what, "is given twice, with - and with _")
        if option.multiple and not isinstance(value, list):
            value = [value]
        kinds = (bool,) if option.is_flag else option.type.toml
        for item in value if option.multiple and isinstance(value, list) else [value]:
            if not isinstance(item, kinds) or (isinstance(item, bool) and not option.is_flag):
                expected = "true or false" if option.is_flag else option.type.expected
                raise _WrongSettingError(what, f"is {_show(item)}; give {expected}")
        try:
            option.type_cast_value(self._context, value)
        except click.BadParameter as error:
            raise _WrongSettingError(what, error.message.rstrip(".")) from None
        row = self._rows[table, key] = FileSetting(table, key, value, self._above.get(key, ""))
        return row

    def _share_host(self, host: object) -> None:
        """Make ``host`` the default of each command of this run that has the option, unless its
        table has one.
        """
        invoked = self._context.invoked_subcommand
        for words in self._root.leaves():
            if invoked in (None, words[0]):
                option = options(self._root.at(words).params).get("host")
                if option is not None and option.type.is_number:  # the gateway's is an address
                    self._inside(words).setdefault(option.name, host)

    def _inside(self, words: tuple[str, ...]) -> dict[str, Any]:
        """Return the defaults of a command, for changes."""
        inside = self._defaults
        for word in words:
            inside = inside.setdefault(word, {})
        return inside


def _show(value: object) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a table"
    return json_library.dumps(value, default=str, ensure_ascii=False)


_LEGEND = Legend(
    {
        "table": "the command of the setting, or all",
        "key": "the option",
        "value": "the value in the file",
        "unused": "the flag or variable that overrides the setting",
    }
)


@explains(_LEGEND)
def show_settings(json: Json = False) -> None:
    """Show which beluga.toml is read, and its settings.

    Flags override the environment, the environment overrides the file, and the file overrides
    defaults.
    """
    file = click.get_current_context().find_root().obj or FileSettings()
    searched = [str(path) for path in config.settings_paths()]
    if json:
        rows = [vars(row) for row in file.rows]
        path = None if file.path is None else str(file.path)
        print_json({"file": path, "searched": searched, "settings": rows})
    elif file.path is None:
        print_note(
            f"there is no settings file: neither --config, BELUGA_CONFIG, {' nor '.join(searched)}"
        )
    else:
        print_note(f"settings in {file.path}")
        if file.rows:
            print_table(_LEGEND, list(map(_row, file.rows)))


def _row(row: FileSetting) -> list[str]:
    value = row.value
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    return [f"[{row.table}]" if row.table else "all", row.key, text, row.unused]
