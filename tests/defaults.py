# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prints what the calls of Beluga do unless they are told otherwise: a line for each call or public
constant, under a line for each module that could be imported.

``python tests/defaults.py >tests/defaults.txt`` records them. It is a program, so that nothing of a
test stands in for a module.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import beluga

SIMPLE = (bool, int, float, str, bytes, type(None))
HERE = (str(Path(__file__).resolve().parent.parent), sys.prefix)  # paths of this machine


def shown(value: object) -> str | None:
    """A default as a reader sees it; None for what is no simple value."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        parts = [shown(part) for part in value]
        return None if None in parts else f"({','.join(map(str, parts))})"
    if isinstance(value, str) and any(place in value for place in HERE):
        return None
    return repr(value) if isinstance(value, SIMPLE) else None


def defaults_of(call: object) -> str:
    """Its parameters that have simple defaults."""
    try:
        parameters = inspect.signature(call).parameters.values()  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return ""
    found = []
    for parameter in parameters:
        if parameter.default is not parameter.empty and (text := shown(parameter.default)):
            found.append(f"{parameter.name}={text}")
    return " ".join(found)


def constants(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public numbers that the module itself names."""
    for statement in ast.parse(inspect.getsource(module)).body:
        for target in statement.targets if isinstance(statement, ast.Assign) else ():
            if isinstance(target, ast.Name) and target.id.isupper() and target.id[0] != "_":
                value = getattr(module, target.id)
                if not isinstance(value, str | bytes):
                    yield target.id, value


def lines_of(module: ModuleType) -> Iterator[str]:
    """What is defined in a module: functions, classes and their methods, constants."""
    for name, value in constants(module):
        if text := shown(value):
            yield f"{module.__name__}.{name} {text}"
    for name, value in vars(module).items():
        place = f"{module.__name__}.{name}"
        if name.startswith("_"):
            continue
        if getattr(value, "__module__", "") != module.__name__ or not callable(value):
            continue
        if not isinstance(value, enum.EnumMeta) and (text := defaults_of(value)):
            yield f"{place} {text}"
        for inner, call in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(call, "__func__", call)  # of a class method
            text = "" if inner.startswith("_") else defaults_of(function)
            if text and inspect.isfunction(function):
                yield f"{place}.{inner} {text}"


def main() -> None:
    for found in sorted(pkgutil.walk_packages(beluga.__path__, "beluga."), key=lambda m: m.name):
        if found.name.rpartition(".")[2].startswith("_"):
            continue
        try:
            module = importlib.import_module(found.name)
        except ImportError:  # an engine's package, or an extra that is not installed
            continue
        print(found.name)
        print(*sorted(lines_of(module)), sep="\n")


if __name__ == "__main__":
    main()
