# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The frame of ``beluga`` and ``cxl-rpc`` over click: functions become commands.

A command is a function, and its parameters are the options::

    def ping(pool: PoolPaths = None, count: Annotated[int, Option(min=1)] = 1) -> None:
        '''Call the server.

        --count: The number of calls.
        '''

The docstring ends with the help of each option or argument, after its name and the name of its
value, if that is not the usual one. Options of several commands have their help in ``Option``. A
module is imported when its command runs or shows its help. A wrong command line ends with status 2
and one line on stderr.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from beluga.cli import logs
from beluga.errors import BelugaError

Function = TypeVar("Function", bound=Callable[..., Any])


class Legend(dict[str, str]):
    """The headings of a table's columns and their meanings, in order."""


def explains(*legends: Legend) -> Callable[[Function], Function]:
    """Return a decorator for a command that prints tables with these legends."""

    def give(command: Function) -> Function:
        command.__dict__["legends"] = legends
        return command

    return give


def legends_of(command: Any) -> tuple[Legend, ...]:
    """Return the legends of a command, or of a function that wraps it."""
    return getattr(command, "legends", ())


_WIDTH_MIN = 20  # columns
_WIDTH_MAX = 120  # longer lines are hard to read
_NARROW = 60  # names take at most a third of a line, or a quarter of a narrow one
_INDENT = 2
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": _WIDTH_MAX}

BadParameter = click.BadParameter
Exit = click.exceptions.Exit


class Option:
    """An option of a command; without names it has that of its parameter.

    ``words`` are its only values, ``{words}`` in its help; ``completes`` returns the shell's
    completions of a text; ``parser`` raises BadParameter.
    """

    def __init__(
        self,
        *names: str,
        help: str = "",  # noqa: A002  the words of click and of a range
        metavar: str | None = None,
        min: float = -math.inf,  # noqa: A002
        max: float = math.inf,  # noqa: A002
        words: tuple[str, ...] = (),
        parser: Callable[[str], Any] | None = None,
        completes: Callable[[str], list[str]] | None = None,
    ) -> None:
        self.names, self.help, self.metavar = names, help, metavar
        self.min, self.max = min, max
        self.words, self.parser, self.completes = words, parser, completes


class Argument(Option):
    """A positional argument of a command."""


class OptionGroup(Option):
    """Options that several commands have: the parameters of ``make``, whose docstring has their
    help. A command's parameter with this annotation gets its result.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make


class Value(click.ParamType):  # type: ignore[type-arg]
    """The values of an option. Those of a number are in its range; infinity and NaN are in no
    range. ``toml`` are their types in beluga.toml, ``expected`` describes them.
    """

    name = "text"

    def __init__(self, kind: type, option: Option) -> None:
        self.kind, self.option = kind, option
        self.is_number = kind in (int, float) and option.parser is None
        self.toml: tuple[type, ...] = (str,)
        self.expected = "text in quotes"
        if self.is_number:
            self.toml = (int,) if kind is int else (int, float)
            self.expected = "a whole number" if kind is int else "a number"
        elif kind is int:  # bytes, which the parser reads
            self.toml, self.expected = (int, str), "a size, such as 4096 or '64M'"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        option = self.option
        if self.is_number:
            return self._number(value)
        if option.words and value not in option.words:
            *others, last = option.words
            choices = f"{', '.join(others)} or {last}" if others else last
            self.fail(f"is {value!r}; give {choices}")
        if option.parser is not None:
            parsed = option.parser(value)
            if self.kind is int and not option.min <= parsed <= option.max:
                self.fail(f"is {value}; give {self.range()} bytes")
            return parsed
        return Path(value) if self.kind is Path else value

    def _number(self, value: Any) -> float:
        try:
            number: float = self.kind(value)
        except (ValueError, OverflowError):
            self.fail(f"is {value!r}; give {f'{self.expected} {self.range()}'.strip()}")
        if not self.option.min <= number <= self.option.max or math.isinf(number):
            self.fail(f"is {value}; give {self.range() or 'a finite number'}")
        return number

    def range(self) -> str:
        """Return the range of a number as text, or ""."""
        low, high = self.option.min, self.option.max
        if math.isfinite(low) and math.isfinite(high):
            return f"{low} to {high}"
        return f"at least {low}" if math.isfinite(low) else ""

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        if self.kind is Path:
            return [CompletionItem(incomplete, type="file")]
        if self.option.completes is not None:
            return [CompletionItem(text) for text in self.option.completes(incomplete)]
        return [CompletionItem(text) for text in self.option.words if text.startswith(incomplete)]


class _Formatter(click.HelpFormatter):
    """Never truncates names and their values: a text that does not fit next to its name starts
    below it, and a word that is longer than a line is broken.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__(width=min(width(), _WIDTH_MAX))

    def write_text(self, text: str) -> None:
        paragraphs = (" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))
        lines = ("\n".join(fill(part, self.width)) for part in paragraphs)
        self.write("\n\n".join(lines) + "\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], *_: Any, **__: Any) -> None:
        rows = list(rows)
        limit = self.width // (4 if self.width < _NARROW else 3)
        fitting = [len(name) for name, _ in rows if _INDENT + len(name) <= limit]
        column = 2 * _INDENT + max(fitting, default=2)
        for name, text in rows:
            lines = fill(" ".join(text.split()), self.width, indent=column)
            head = fill(name, self.width, indent=_INDENT)
            if lines and len(head) == 1 and len(head[0]) + _INDENT <= column:
                head = [head[0].ljust(column) + lines.pop(0)[column:]]
            self.write("".join(f"{line}\n" for line in (*head, *lines)))


def width() -> int:
    """Return the width of the terminal, or COLUMNS."""
    import shutil  # slow to import

    return max(shutil.get_terminal_size().columns, _WIDTH_MIN)


def fill(text: str, room: int, *, indent: int = 0) -> list[str]:
    """Wrap text to at most ``room`` columns. Words are broken only if they are longer than a line,
    and never at hyphens.
    """
    space = " " * indent
    return textwrap.wrap(
        text,
        max(room, indent + 8),
        initial_indent=space,
        subsequent_indent=space,
        break_on_hyphens=False,
    )


class _HelpContext(click.Context):
    formatter_class = _Formatter


class Command(click.Command):
    """A command. Its errors name the settings file if that has the wrong value."""

    context_class = _HelpContext

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write_text(self.help or "")

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Do nothing: click from 8.5 on calls this, and format_options lists the arguments."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            shown = [_row(param) for param in self.get_params(ctx) if param.param_type_name == kind]
            if shown:
                with formatter.section(title):
                    formatter.write_dl(shown)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        rows = [row for legend in legends_of(self.callback) for row in legend.items()]
        if rows:
            with formatter.section("Columns"):
                formatter.write_dl([(f"{name}:", text) for name, text in rows])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.BadOptionUsage as error:
            error.ctx = error.ctx or ctx  # click's parser does not know its context
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BadParameter as error:
            setting = self._set_in_file(ctx, error.message)
            raise BadParameter(error.message + setting, error.ctx or ctx, error.param) from None
        except BelugaError as error:
            if setting := self._set_in_file(ctx, str(error)):
                error.args = (f"{error}{setting}", *error.args[1:])
            raise

    def _set_in_file(self, ctx: Any, text: str) -> str:
        named = set(re.findall(r"--[a-z][a-z-]*", text))
        for option in self.params:
            source = ctx.get_parameter_source(option.name)
            if source is not None and source.name == "DEFAULT_MAP" and named & set(option.opts):
                return f"; {max(option.opts, key=len)} is set in {ctx.find_root().obj.path}"
        return ""


def _row(param: Any) -> tuple[str, str]:
    """Return a parameter's names and its help with the default and the range."""
    names = ", ".join(param.opts) if param.param_type_name == "option" else param.metavar
    if param.secondary_opts:
        names += f" / {', '.join(param.secondary_opts)}"
    if param.param_type_name == "option" and not param.is_flag:
        names += f" {param.metavar}"
    notes = []
    if param.default not in (None, "", False, True) and isinstance(
        param.default, int | float | str
    ):
        notes.append(f"default: {param.default}")
    if isinstance(param.type, Value) and param.type.is_number and (limits := param.type.range()):
        notes.append(limits)
    return names, f"{param.help or ''} [{'; '.join(notes)}]" if notes else param.help or ""


class CommandGroup(click.Group):
    """A group that imports its commands on access.

    ``targets`` maps each command to ``module:function`` of this package, or to a subgroup.
    """

    context_class = _HelpContext
    format_help_text = Command.format_help_text

    def __init__(
        self, text: str, targets: Mapping[str, str | CommandGroup], **details: Any
    ) -> None:
        super().__init__(help=text, no_args_is_help=True, context_settings=_SETTINGS, **details)
        self.targets = targets

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.targets)

    def get_command(self, ctx: Any, name: str) -> click.Command | None:
        if name not in self.commands and name in self.targets:
            target = self.targets[name]
            if isinstance(target, CommandGroup):
                target.name = name
            self.commands[name] = command_of(name, target) if isinstance(target, str) else target
        return self.commands.get(name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.targets and not ctx.resilient_parsing:
            ctx.fail(f"{args[0]!r} is not a command{suggest(args[0], self.targets)}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Options"):
            formatter.write_dl([_row(param) for param in self.get_params(ctx)])
        with formatter.section("Commands"):
            helps = {name: self.at((name,)).help or "" for name in self.targets}
            formatter.write_dl([(name, text.partition("\n\n")[0]) for name, text in helps.items()])

    def leaves(self) -> Iterator[tuple[str, ...]]:
        """Yield the words of each command, such as ``("pool", "create")``, without importing it."""
        for name, target in self.targets.items():
            if isinstance(target, str):
                yield (name,)
            else:
                yield from ((name, *words) for words in target.leaves())

    def at(self, words: Sequence[str]) -> Any:
        """Import and return a command."""
        command: Any = self
        for word in words:
            command = command.get_command(None, word)
        return command


class Program(CommandGroup):
    """A whole program, with options before its commands."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # for which click prints an empty line
            sys.exit(130)

    def main(self, *arguments: Any, **settings: Any) -> Any:
        """Run a command line, and exit: with status 2 and one line if it is wrong."""
        try:
            sys.exit(super().main(*arguments, **settings | {"standalone_mode": False}))
        except click.exceptions.NoArgsIsHelpError as error:
            print(error.message, file=sys.stderr)
            sys.exit(2)
        except click.UsageError as error:
            _refuse(error)
        except click.Abort:  # a question was answered with no, or there is nobody to answer
            if not sys.stdin.isatty():
                print(file=sys.stderr)  # ends the line of the question
            logs.fail(self.name or "", "not confirmed, so nothing was changed; give --yes")


def _refuse(error: click.UsageError) -> NoReturn:
    """Exit with status 2 and one line: what is wrong, and how to get the help."""
    path = error.ctx.command_path if error.ctx is not None else Path(sys.argv[0]).name
    text = error.message if error.message else error.format_message()
    param = getattr(error, "param", None)
    name = param and (max(param.opts, key=len) if param.opts[0][:1] == "-" else param.metavar)
    if isinstance(error, click.MissingParameter):
        text = f"{name} is missing; give it"
    elif isinstance(error, click.BadOptionUsage) and "requires" in error.message:
        text = f"{error.option_name} has no value; give one"
    elif isinstance(error, click.NoSuchOption):
        near = [text for text in error.possibilities or () if text.startswith("--")]
        mend = f"; did you mean {near[0]}?" if near else ""
        text = f"{error.option_name} is not an option{mend}"
    elif text.startswith("Got unexpected extra argument"):
        text = f"{text[len('Got ') :]}; remove it"
    elif text.endswith("does not take a value."):
        text = f"{text[:-1]}; remove it"
    elif name and name not in text:
        text = f"{name} {text}" if text.startswith("is ") else f"{name}: {text}"
    logs.fail(path, f"{' '.join(text.split())} (see '{path} --help')", 2)


def suggest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` if one of the known names is similar, else ""."""
    import difflib  # slow to import, and needed only for errors

    plain = {text.strip("[]").replace("-", "_"): text for text in names}
    close = difflib.get_close_matches(name.replace("-", "_"), plain, 1)
    return f"; did you mean {plain[close[0]]}?" if close else ""


def command_of(name: str, target: str) -> Command:
    """Import ``module:function``, and return the command that calls the function."""
    module, _, attribute = target.partition(":")
    function = getattr(import_module(f"beluga.cli.{module}"), attribute)
    params = parameters_of(function)
    several = {param.name for param in params if param.multiple or param.nargs == -1}
    groups = {
        name: (option.make, [param.name for param in parameters_of(option.make)])
        for name, (_, option) in _annotations(function).items()
        if isinstance(option, OptionGroup)
    }

    @functools.wraps(function)
    def run(**values: Any) -> None:
        values |= {name: list(values[name] or ()) or None for name in several}
        for group, (make, names) in groups.items():
            values[group] = make(**{name: values.pop(name) for name in names})
        function(**values)

    text, _ = _documented(function)
    return Command(name, callback=run, params=params, help=text, context_settings=_SETTINGS)


# The first line of a parameter's help in a docstring: its name, its value, and the text.
_HELP = re.compile(r"(--[a-z][a-z-]*|\[?[A-Z]+\]?\S*)(?: (\S+))?: ")


def _documented(function: Callable[..., None]) -> tuple[str, dict[str, tuple[str, str]]]:
    """Split a command's docstring into the help of the command, and the name of the value and the
    help of each parameter.
    """
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    first = next((i for i, line in enumerate(lines) if _HELP.match(line)), len(lines))
    helps: dict[str, tuple[str, str]] = {}
    for line in lines[first:]:
        if start := _HELP.match(line):
            name, metavar = start.groups(default="")
            helps[name] = metavar, line[start.end() :]
        else:
            helps[name] = helps[name][0], f"{helps[name][1]} {line.strip()}"
    return "\n".join(lines[:first]).rstrip(), helps


def parameters_of(function: Callable[..., Any]) -> list[Any]:
    """Return click's parameters for those of a function."""
    _, helps = _documented(function)
    defaults = inspect.signature(function).parameters
    params = []
    for name, (hint, option) in _annotations(function).items():
        if isinstance(option, OptionGroup):
            params += parameters_of(option.make)
        else:
            params.append(_parameter(name, hint, option, defaults[name].default, helps))
    if helps:
        raise TypeError(f"{function.__name__} has no parameter {', '.join(helps)}")
    return params


def _annotations(function: Callable[..., Any]) -> dict[str, tuple[Any, Option]]:
    """Return the type and the option of each parameter."""
    annotations = {}
    hints = typing.get_type_hints(function, include_extras=True)
    for name in inspect.signature(function).parameters:
        hint, option = hints[name], Option()
        if typing.get_origin(hint) is typing.Union:  # Python 3.10 makes one of a default of None
            inner = typing.get_args(hint)[0]
            hint = inner if typing.get_origin(inner) is Annotated else hint
        if typing.get_origin(hint) is Annotated:
            hint, option = typing.get_args(hint)
        annotations[name] = hint, option
    return annotations


def _parameter(
    name: str, hint: Any, option: Option, default: Any, helps: dict[str, tuple[str, str]]
) -> Any:
    """Return a parameter of click, and take its help."""
    kind, several = _kind_of(hint)
    value = Value(kind, option)
    required = default is inspect.Parameter.empty
    plain = f"--{name.replace('_', '-')}"
    names = option.names or (plain,)
    is_argument = isinstance(option, Argument)
    documented = next(iter(helps), "") if is_argument else max(names, key=len)
    metavar, text = (option.metavar, option.help) if option.help else helps.pop(documented)
    text = text.replace("{words}", ", ".join(option.words))
    if is_argument:
        argument = click.Argument(
            [name],
            type=value,
            nargs=-1 if several else 1,
            metavar=metavar or (name.upper() if option.help else documented),
            required=required,
            **({} if required or several else {"default": default}),
        )
        vars(argument)["help"] = text  # which click has only for options
        return argument
    if kind is bool:
        names = (f"{plain}/--no-{plain[2:]}",) if default else names
        return click.Option([name, *names], is_flag=True, default=default, help=text)
    if not metavar:
        sized = kind is int and option.parser is not None
        metavar = "|".join(option.words) or ("SIZE" if sized else _METAVARS.get(kind, "TEXT"))
    return click.Option(
        [name, *names],
        type=value,
        multiple=several,
        required=required,
        **({} if required else {"default": default}),  # None would count as a value
        metavar=metavar,
        help=text,
    )


_METAVARS = {int: "N", float: "X", Path: "PATH"}


def _kind_of(hint: Any) -> tuple[type, bool]:
    """Return the type of one value, and whether there may be several."""
    inner = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if typing.get_origin(hint) is list:
        return inner[0], True
    return _kind_of(inner[0]) if inner else (hint, False)
