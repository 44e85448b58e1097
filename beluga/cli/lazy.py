# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Command groups that import a command's module only when it runs or shows its help.

A group maps each command to its location, such as ``"block:put"`` for the function ``put`` of
``beluga/cli/block.py``, or to a table of locations for a subgroup. The help of a group shows the
docstrings of its commands, which are read from the sources without importing them.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from beluga.cli.help import help_of
from beluga.cli.legend import epilog_of
from beluga.cli.options import HELP
from beluga.errors import BelugaError

_PACKAGE = "beluga.cli"
_DOCSTRING = re.compile(r':\n    ("""(?:[^"\\]|\\.|"(?!""))*""")', re.DOTALL)


class Inner:
    """A subgroup: its help, and the locations of its commands."""

    def __init__(self, text: str, places: Mapping[str, str]) -> None:
        self.text, self.places = text, places


Places = Mapping[str, "str | Inner"]


def program(text: str, places: Places) -> typer.Typer:
    """Create a program with this help and these commands."""

    class Root(LazyGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(places=places, **settings)

    return typer.Typer(
        cls=Root,
        help=text,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings=HELP,
    )


def leaves(group: Any) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command of a group, such as ``("pool", "create")``, without importing
    it.
    """
    for name, place in group.commands.places.items():
        if isinstance(place, str):
            yield (name,)
        else:
            yield from ((name, *words) for words in leaves(group.commands[name]))


def command_at(group: Any, words: tuple[str, ...]) -> Any:
    """Import and return a command."""
    for word in words:
        group = group.commands[word]
    return group


class LazyGroup(TyperGroup):
    """A group whose ``commands`` are created on access."""

    def __init__(self, *, places: Places, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands(places)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of the table."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the help without importing the commands."""
        typer.echo(help_of(self.described(), ctx), nl=False)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the completions of a word without importing the commands."""
        ctx.command = self.described()
        try:
            return TyperGroup.shell_complete(ctx.command, ctx, incomplete)
        finally:
            ctx.command = self

    def described(self) -> LazyGroup:
        """Return a copy of this group whose commands have only a name and a help text."""
        other = copy.copy(self)
        other.commands = {
            name: TyperCommand(name, help=_help_of(place))
            for name, place in self.commands.places.items()
        }
        return other


class _Commands(Mapping[str, Any]):
    """The commands of a group by name. A command is imported when it is looked up."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _make(name, self.places[name])
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _make(name: str, place: str | Inner) -> Any:
    if isinstance(place, Inner):
        return LazyGroup(name=name, places=place.places, help=place.text, no_args_is_help=True)
    module, _, function = place.partition(":")
    single = typer.Typer(add_completion=False)
    command = getattr(import_module(f"{_PACKAGE}.{module}"), function)
    single.command(name, cls=_CommandWithFile, epilog=epilog_of(command))(command)
    return typer.main.get_command(single)


class _CommandWithFile(TyperCommand):
    """A command whose errors show which options come from ``beluga.toml``."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # typer ignores the formatter when a command without arguments shows its help.
        typer.echo(help_of(self, ctx), nl=False)

    def invoke(self, ctx: Any) -> Any:
        try:
            self._refuse_endless(ctx)
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message += self._set_in_file(ctx, error.message)
            raise
        except BelugaError as error:
            if where := self._set_in_file(ctx, str(error)):
                error.args = (f"{error}{where}", *error.args[1:])
            raise

    def _refuse_endless(self, ctx: Any) -> None:
        """Reject inf and nan, which pass or fail every range check. No option allows them."""
        for option in self.params:
            value = ctx.params.get(option.name)
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, float) and not math.isfinite(one):
                    raise typer.BadParameter(
                        f"{max(option.opts, key=len)} is {one}; give a finite number"
                    )

    def _set_in_file(self, ctx: Any, text: str) -> str:
        named = set(re.findall(r"--[a-z][a-z-]*", text))
        for option in self.params:
            source = ctx.get_parameter_source(option.name)
            if source is not None and source.name == "DEFAULT_MAP" and named & set(option.opts):
                return f"; {max(option.opts, key=len)} is set in {ctx.find_root().obj.path}"
        return ""


def _help_of(place: str | Inner) -> str:
    if isinstance(place, Inner):
        return place.text
    module, _, function = place.partition(":")
    return _docstring(_source(module), function)


@cache
def _source(module: str) -> str:
    spec: Any = find_spec(f"{_PACKAGE}.{module}")
    return spec.loader.get_source(spec.name) or ""


def _docstring(source: str, function: str) -> str:
    """Return the docstring of a module's function, without parsing the rest of the module, which
    takes a hundred times as long.
    """
    _, _, rest = source.partition(f"\ndef {function}(")
    found = _DOCSTRING.search(rest.partition("\ndef ")[0])
    return inspect.cleandoc(ast.literal_eval(found[1])) if found else ""
