# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Legends: the meanings of the columns in a command's tables.

A table is printed with headings from its legend, and :func:`explains` adds the legend to the
command's help and to its section in ``docs/reference/commands.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
    found: tuple[Legend, ...] = getattr(command, "legends", ())
    return found


def epilog_of(command: Any) -> str | None:
    """Return the end of a command's help: a line for each column of its tables."""
    lines = [f"{name}: {text}" for legend in legends_of(command) for name, text in legend.items()]
    return "\n".join(["Columns:", *lines]) if lines else None
