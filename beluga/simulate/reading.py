# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How a trace file was read: the format, the units, the size of blocks, and what was left out.

What was guessed is named with the option that sets it, since a wrong guess changes every result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from beluga.errors import TraceError

_BAD_SHARE = 10  # at most one item in this many may be unreadable
TIME_UNITS = {"s": 1, "ms": 1000}  # units in a second: a quotient is rounded once, 0.001 twice


@dataclass(slots=True)
class Reading:
    """The options of a reader, and what it assumed and skipped."""

    path: Path
    form: str
    form_given: bool = False
    requested_unit: str | None = None  # one of TIME_UNITS
    time_unit: str | None = None  # the unit of numeric times; None if there are none
    time_guessed: bool = False
    block_tokens: int = 0
    block_given: bool = False
    block_note: str = ""  # where block_tokens comes from, if it was not given
    item_count: int = 0
    bad: list[str] = field(default_factory=list)  # items that cannot be read: their errors
    left_out: dict[str, int] = field(default_factory=dict)  # why, and how many

    def skip(self, place: str, why: str) -> None:
        """Leave out an item that cannot be read."""
        self.bad.append(f"{place}: {why}")

    def leave_out(self, why: str) -> None:
        """Leave out a valid item that is not a request."""
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def check(self) -> None:
        """Refuse a file if too many of its items cannot be read. Raises TraceError."""
        count = len(self.bad)
        if count == self.item_count > 0 or count > max(1, self.item_count // _BAD_SHARE):
            rest = f" ({count} of {self.item_count} items cannot be read)" * (count > 1)
            raise TraceError(f"{self.bad[0]}{rest}")

    def advise(self, error: str) -> str:
        """Return an error's text with the format's name, if that was guessed."""
        if self.form_given:
            return error
        return f"{error}; the format was guessed as {self.form}, set --format if that is wrong"

    def facts(self) -> dict[str, object]:
        """Return what ``str()`` shows, as JSON has it: each value, and whether it was guessed."""
        return {
            "file": self.path.name,
            "format": self.form,
            "format_guessed": not self.form_given,
            "time_unit": self.time_unit,
            "time_unit_guessed": self.time_guessed,
            "block_tokens": self.block_tokens,
            "block_tokens_guessed": not self.block_given,
            "block_tokens_note": "" if self.block_given else self.block_note,
            "left_out": self.left_out,
            "skipped": self.bad,
        }

    def __str__(self) -> str:
        parts = [f"format {self.form}{'' if self.form_given else ' (guessed; --format)'}"]
        if self.time_unit is not None:
            parts.append(
                f"times in {self.time_unit}{' (guessed; --time-unit)' * self.time_guessed}"
            )
        note = "" if self.block_given else f" ({self.block_note})"
        parts.append(f"blocks of {self.block_tokens} tokens{note}")
        parts += [f"left out {count}: {why}" for why, count in self.left_out.items()]
        if self.bad:
            parts.append(f"skipped {len(self.bad)} of {self.item_count} items: {self.bad[0]}")
        return f"{self.path.name}: {'; '.join(parts)}"
