# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a check finds, and how a check says that it cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Level: TypeAlias = Literal["ok", "warning", "error"]

_LEVELS: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. What cannot be told is a warning whose text says so."""

    name: str
    level: Level
    text: str
    mend: str  # the command that mends it; "" if all is well


class Verdict(NamedTuple):
    """A finding without the name of its check."""

    level: Level
    text: str
    mend: str


def ok(text: str) -> Verdict:
    """Say that all is well."""
    return Verdict("ok", text, "")


def warning(text: str, mend: str) -> Verdict:
    """Say what costs speed, or may fail later."""
    return Verdict("warning", text, mend)


def error(text: str, mend: str) -> Verdict:
    """Say what keeps Beluga from working here, or from being right."""
    return Verdict("error", text, mend)


def unknown(why: str, mend: str) -> Verdict:
    """Say that something cannot be told, and what tells it."""
    return warning(f"cannot be told: {why}", mend)


class CannotTellError(Exception):
    """Raised inside a check: what it looks at says nothing."""

    def __init__(self, why: str, mend: str) -> None:
        super().__init__(why)
        self.mend = mend


def worst(verdicts: Sequence[Verdict], well: str) -> Verdict:
    """Join verdicts about several things. ``well`` is said if each of them is ok."""
    wrong = [verdict for verdict in verdicts if verdict.level != "ok"]
    if not wrong:
        return ok(well)
    level = max((verdict.level for verdict in wrong), key=_LEVELS.index)
    mends = dict.fromkeys(verdict.mend for verdict in wrong)
    return Verdict(level, "; ".join(verdict.text for verdict in wrong), " && ".join(mends))
