# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Errors and hints name only commands and options that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from beluga.cli.app import app, cxl_rpc

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = {"beluga": app, "cxl-rpc": cxl_rpc}
# Options of other programs that our texts name: engines, pip, docker, daxctl, accel-config, the
# CUDA compiler.
OF_OTHERS = {
    "--kv-events-config",
    "--max-num-batched-tokens",
    "--enable-metrics",
    "--enable-prefix-caching",
    "--prefix-caching-hash-algo",
    "--shm-size",
    "--force-reinstall",
    "--align",
    "--mode",
    "--type",
    "--driver-name",
    "--group-id",
    "--wq-size",
    "--threshold",
    "--max-batch-size",
    "--priority",
    "--code-revision",
    "--revision",
    "--std",
}
VERBS = {
    "can",
    "cannot",
    "does",
    "finds",
    "for",
    "has",
    "knows",
    "needs",
    "serves",
    "stores",
}  # "beluga needs ..."
GENERATED = {"_core.c", "html.py"}  # the last one has CSS, whose variables begin with --
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?!-)")
# A command, its options and the values of these, up to the end of the quotation or of the part.
SHOWN = re.compile(r"(?<![\w./-])(beluga|cxl-rpc) ([a-z][a-z-]*)(?: ([a-z]+))?([^'`\",;:()]*)")


def options_by_command() -> dict[tuple[str, ...], set[str]]:
    """Return the options of each command by its words; groups and programs have none."""
    by_command: dict[tuple[str, ...], set[str]] = {}
    for name, program in PROGRAMS.items():
        root: Any = program
        by_command[name,] = options_of(root)
        for leaf in root.leaves():
            by_command[(name, *leaf)] = options_of(root.at(leaf))
            by_command.setdefault((name, leaf[0]), set())
    return by_command


def options_of(command: Any) -> set[str]:
    return {text for param in command.params for text in (*param.opts, *param.secondary_opts)}


def files() -> Iterator[Path]:
    for path in (*(ROOT / "beluga").rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]")):
        if path.name not in GENERATED:
            yield path


def texts(path: Path) -> Iterator[str]:
    """Yield the texts in a source file, but not its comments and docstrings. What differs in an
    f-string is {}.
    """
    source = path.read_text()
    if path.suffix != ".py":
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
        yield from re.findall(r'"((?:[^"\\\n]|\\.)*)"', code)
        return
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))  # a docstring
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.value


def test_options_that_are_named_exist() -> None:
    options = set().union(*options_by_command().values(), {"--help"})
    named = {
        option: path for path in files() for text in texts(path) for option in OPTION.findall(text)
    }
    assert len(named) > 30
    assert {
        option: path.name for option, path in named.items() if option not in options | OF_OTHERS
    } == {}
    assert OF_OTHERS - named.keys() == set(), "no text names these any more"


def test_commands_that_are_named_exist_and_have_the_options() -> None:
    commands, wrong, count = options_by_command(), [], 0
    for path in files():
        for text in texts(path):
            for program, first, second, following in SHOWN.findall(text):
                if first in VERBS:
                    continue
                count += 1
                words = (program, first)
                if (*words, second) in commands:
                    words = (*words, second)
                if words not in commands or set(OPTION.findall(following)) - commands[words]:
                    wrong.append(f"{path.name}: {program} {first} {second}{following}")
    assert count > 20
    assert wrong == []
