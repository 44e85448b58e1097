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
from beluga.cli.frame import Context, Legend, Number, explains, parameters_of, suggest
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


def load(path: Path | None, context: Context, above: Mapping[str, str]) -> FileSettings:
    """Read the file for the context's program. Raises SettingsError.

    ``above`` maps overridden keys to their flag or variable.
    """
    return FileSettings() if path is None else _Reader(path, context, above).settings()


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


class _Reader:
    def __init__(self, path: Path, context: Context, above: Mapping[str, str]) -> None:
        self._path, self._context, self._above = path, context, above
        self._root: Any = context.command
        self._tables = tables(self._root)
        self._shared_options = options(parameters_of(_shared))
        self._rows: dict[tuple[str, str], FileSetting] = {}
        self._defaults: dict[str, Any] = {}

    def settings(self) -> FileSettings:
        """Check every value of the file."""
        for name, value in self._parsed().items():
            if name == "copy":
                self._read_copies(value)
            elif isinstance(value, dict):
                self._read_table(name, value)
            elif name.replace("_", "-") in self._tables:
                raise self._wrong(name, f"is a table; write [{name}] above its settings")
            elif name.replace("-", "_") not in self._shared_options:
                names = [*self._shared_options, *(f"[{table}]" for table in self._tables)]
                raise self._wrong(name, f"is not a setting of all commands{suggest(name, names)}")
            else:
                self._keep("", name, self._shared_options, value)
        shared = {key: row.value for (table, key), row in self._rows.items() if not table}
        if "host" in shared:  # the other keys also apply to commands without that option
            self._share_host(shared["host"])
        return FileSettings(self._path, shared, self._defaults, tuple(self._rows.values()))

    def _parsed(self) -> dict[str, Any]:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            with self._path.open("rb") as file:
                data = file.read(_SIZE_MAX + 1)
            if len(data) > _SIZE_MAX:
                raise SettingsError(
                    f"{self._path} has more than {_SIZE_MAX} bytes; make it smaller"
                )
            parsed: dict[str, Any] = tomllib.loads(decode_text(data))
        except OSError as error:
            raise SettingsError(f"{self._path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise SettingsError(f"{self._path}, line {line}: the text is not UTF-8") from None
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{self._path}: {error}") from None
        except RecursionError:
            raise SettingsError(f"{self._path}: its lists are nested too deeply") from None
        return parsed

    def _read_table(self, name: str, values: Mapping[str, object]) -> None:
        table = name.replace("_", "-")
        if table not in self._tables:
            self._refuse_table(table)
            return
        by_key = options(self._root.at(self._tables[table]).params)
        for setting, value in values.items():
            key = setting.replace("-", "_")
            if key in ONCE:
                text = "applies to one run only; give it on the command line"
                raise self._wrong(f"[{name}] {setting}", text)
            if key not in by_key:
                text = f"is not an option of this command{suggest(key, by_key)}"
                raise self._wrong(f"[{name}] {setting}", text)
            row = self._keep(table, setting, by_key, value)
            if not row.unused:
                self._default(self._tables[table], by_key[key], row.value)

    def _read_copies(self, values: object) -> None:
        """Check the sizes of copies, which caches read (:func:`beluga.config.copy_settings`)."""
        from beluga.transfer import copy_setting_names

        if not isinstance(values, dict):
            raise self._wrong("copy", "is a table; write [copy] above its settings")
        names = copy_setting_names()
        for name, value in values.items():
            key = name.replace("_", "-")
            if key not in names:
                text = f"is not a size of copies{suggest(key, names)}"
                raise self._wrong(f"[copy] {name}", text)
            if type(value) is not int or value < 0:
                raise self._wrong(f"[copy] {name}", f"is {value!r}; give a number of bytes")
            self._rows["copy", key] = FileSetting("copy", key, value, "")

    def _refuse_table(self, table: str) -> None:
        """Raise SettingsError unless the table belongs to the other program."""
        if (self._root.name == "beluga") == table.startswith("cxl-rpc-"):
            return
        if self._root.name != "beluga":
            raise self._wrong(f"[{table}]", f"is not a command of {self._root.name}")
        inside = [f"[{name}]" for name in self._tables if name.startswith(f"{table}-")]
        if inside:
            raise self._wrong(f"[{table}]", f"is a group of commands; write {', '.join(inside)}")
        raise self._wrong(f"[{table}]", f"is not a command{suggest(table, self._tables)}")

    def _keep(self, table: str, name: str, by_key: Mapping[str, Any], value: object) -> FileSetting:
        """Check a value and record it. A list of one item may be given without brackets."""
        what = f"[{table}] {name}" if table else name
        key = name.replace("-", "_")
        option = by_key[key]
        if (table, key) in self._rows:
            raise self._wrong(what, "is given twice, with - and with _")
        if option.multiple and not isinstance(value, list):
            value = [value]
        kinds = (bool,) if option.is_flag else option.type.toml
        expected = "true or false" if option.is_flag else option.type.expected
        for item in value if option.multiple and isinstance(value, list) else [value]:
            if not isinstance(item, kinds) or (isinstance(item, bool) and not option.is_flag):
                raise self._wrong(what, f"is {_show(item)}; give {expected}")
        try:
            option.type_cast_value(self._context, value)
        except click.BadParameter as error:
            raise self._wrong(what, error.message.rstrip(".")) from None
        row = self._rows[table, key] = FileSetting(table, key, value, self._above.get(key, ""))
        return row

    def _share_host(self, host: object) -> None:
        """Make ``host`` the default of each command of this run that has the option."""
        invoked = self._context.invoked_subcommand
        for words in self._root.leaves():
            if invoked in (None, words[0]):
                option = options(self._root.at(words).params).get("host")
                # --host of the gateway is an address
                if option is not None and isinstance(option.type, Number):
                    self._default(words, option, host, over=False)

    def _default(
        self, words: tuple[str, ...], option: Any, value: object, *, over: bool = True
    ) -> None:
        """Set a default of a command; ``over`` replaces a shared default."""
        inside = self._defaults
        for word in words:
            inside = inside.setdefault(word, {})
        if over or option.name not in inside:
            inside[option.name] = value

    def _wrong(self, what: str, text: str) -> SettingsError:
        joint = " " if text.startswith("is ") else ": "
        return SettingsError(f"{self._path}: {what}{joint}{text}")


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
def show_settings(context: Context, json: Json = False) -> None:
    """Show which beluga.toml is read, and its settings.

    Flags override the environment, the environment overrides the file, and the file overrides
    defaults.
    """
    file = context.find_root().obj or FileSettings()
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
