#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Writes docs/reference/commands.md from the parsers of ``beluga`` and ``cxl-rpc``.

With ``--check`` nothing is written; the exit status is 1 if the file is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from check_option import is_check

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


from beluga.cli import frame  # noqa: E402  not installed where this runs
from beluga.cli.app import app, cxl_rpc  # noqa: E402
from beluga.router import POLICIES, settings_of  # noqa: E402

TARGET = ROOT / "docs/reference/commands.md"
INTRODUCTION = """\
# Commands

Generated from the command-line parsers by `scripts/dev/gen_commands_doc.py`; do not edit.

`beluga` works on pools with the block index; `cxl-rpc` makes calls over the lanes of a pool without
it. Every command has `-h` and `--help`. `beluga --show-completion` prints the script that
completes commands and options in your shell: add `eval "$(beluga --show-completion)"` to the start
file of bash or zsh, or write it to `~/.config/fish/completions/beluga.fish`. Results go to standard
output, everything else to standard error; `--json` prints JSON, and for commands that run
continuously one object on each line. [Errors](errors.md#exit-codes) lists the exit codes.

Defaults of options come from [`beluga.toml`](settings.md), if there is one. `--config`,
`--log-level` and `--log-format` are given before the command, as in `beluga --log-level debug
ping`.

Without `--pool` a command uses the pool that `BELUGA_POOL=PATH:PATH` names, else that of
`beluga.toml`, else the pool that `beluga mount` remembered, else the emulated pool in `/dev/shm`.
"""


def document() -> str:
    """Return the whole page."""
    leaves = [
        (" ".join((program.name, *words)), program.at(words))
        for program in (app, cxl_rpc)
        for words in sorted(program.leaves())
    ]
    page = [INTRODUCTION, "| command | what it does |", "| --- | --- |"]
    page += [f"| [`{name}`](#{_anchor(name)}) | {_summary(command)} |" for name, command in leaves]
    for name, command in leaves:
        page += ["", *_section(name, command)]
    return "\n".join([*page, "", *_policies()]) + "\n"


def _policies() -> list[str]:
    """Return the section with the settings that the routing policies declare."""
    rows = [
        f"| `{name}` | `{key}` | {declared.default_text} | {declared.range} | {declared.help} |"
        for name in POLICIES
        for key, declared in settings_of(name).items()
    ]
    plain = ", ".join(f"`{name}`" for name in POLICIES if not settings_of(name))
    return [
        "## Settings of policies",
        "",
        "Settings follow the name of a policy: `--policy linear:shared_credit=1,decay=0.5`. The",
        f"others have none: {plain}.",
        "",
        "| policy | setting | default | range | meaning |",
        "| --- | --- | --- | --- | --- |",
        *rows,
    ]


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def _help(command: Any) -> str:
    return str(command.help or "").partition("\f")[0].strip()


def _summary(command: Any) -> str:
    return " ".join(_help(command).split("\n\n")[0].split())


def _section(name: str, command: Any) -> list[str]:
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = [name, *(["[OPTIONS]"] if options else []), *map(_usage_of, arguments)]
    page = [f"## {name}", "", "```text", " ".join(usage), "```", "", _help(command)]
    if arguments or options:
        page += ["", "| option | meaning |", "| --- | --- |"]
    page += [f"| `{_name_of(p)}` | {_cell(p.help)} |" for p in arguments]
    for option in options:
        page.append(f"| {_spelled(option)} | {_cell(option.help)}{_default_of(option)} |")
    for columns in frame.legends_of(command.callback):
        page += ["", "| column | meaning |", "| --- | --- |"]
        page += [f"| `{name}` | {_cell(text)} |" for name, text in columns.items()]
    return page


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def _name_of(argument: Any) -> str:
    return str(argument.metavar or argument.name).strip("[]{}.").upper()


def _usage_of(argument: Any) -> str:
    name = _name_of(argument) + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _spelled(option: Any) -> str:
    names = [f"`{name}`" for name in (*option.opts, *option.secondary_opts)]
    value = "" if option.is_flag else f" `{option.metavar}`"
    marks = [*(["required"] if option.required else []), *(["repeat"] if option.multiple else [])]
    return (
        ", ".join(names) + value.replace("|", "` or `") + (f" ({', '.join(marks)})" * bool(marks))
    )


def _default_of(option: Any) -> str:
    value = option.default
    if isinstance(value, bool) or not isinstance(value, int | float | str) or value == "":
        return ""
    return f" Default: {value}."


def main() -> int:
    check = is_check(__doc__)
    page = document()
    if not check:
        TARGET.write_text(page)
    elif not TARGET.exists() or TARGET.read_text() != page:
        print(f"{TARGET.name} is stale; run scripts/dev/gen_commands_doc.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
