# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The result of a check, and the exception of a check without a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Level: TypeAlias = Literal["ok", "warning", "error"]

_LEVELS: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. An unknown result is a warning."""

    name: str
    level: Level
    text: str
    fix: str  # the command that fixes it; "" if the check passed


class Verdict(NamedTuple):
    """A finding without the name of its check."""

    level: Level
    text: str
    fix: str


def ok(text: str) -> Verdict:
    """Return the verdict of a passed check."""
    return Verdict("ok", text, "")


def warning(text: str, fix: str) -> Verdict:
    """Return a verdict about lost speed or a possible later failure."""
    return Verdict("warning", text, fix)


def error(text: str, fix: str) -> Verdict:
    """Return a verdict about something that breaks Beluga or its results."""
    return Verdict("error", text, fix)


def unknown(why: str, fix: str) -> Verdict:
    """Return the verdict of an unknown result, with the command that determines it."""
    return warning(f"unknown: {why}", fix)


class UndeterminedError(Exception):
    """Raised inside a check whose result cannot be determined."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


def worst(verdicts: Sequence[Verdict], well: str) -> Verdict:
    """Join several verdicts. ``well`` is the text if all of them are ok."""
    wrong = [verdict for verdict in verdicts if verdict.level != "ok"]
    if not wrong:
        return ok(well)
    level = max((verdict.level for verdict in wrong), key=_LEVELS.index)
    fixes = dict.fromkeys(verdict.fix for verdict in wrong)
    return Verdict(level, "; ".join(verdict.text for verdict in wrong), " && ".join(fixes))
