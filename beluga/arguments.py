# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Arguments of the public API: of their type, or refused in one line that names them."""

from __future__ import annotations

import operator
import os
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

from beluga.errors import BadTypeError, BadValueError

StrPath: TypeAlias = "str | os.PathLike[str]"

_SECONDS_MAX = 1e9  # 31 years; C cannot represent much longer times


def whole(name: str, value: Any) -> int:
    """Return a whole number, also one of numpy. Raises BadTypeError."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise BadTypeError(f"{name} is a whole number, not {short(value)}; give an int") from None


def of_type(name: str, value: object, *kinds: type) -> None:
    """Raise BadTypeError unless a value is of one of these types."""
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise BadTypeError(f"{name} is {short(value)}; give a {names}")


def path_of(name: str, value: StrPath) -> Path:
    """Return a path, also of a text. Raises BadTypeError."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise BadTypeError(f"{name} is {short(value)}; give a path, as text or a Path")
    return value if isinstance(value, Path) else Path(text)


def count_of(name: str, value: Any) -> int:
    """Return the length of a sequence. Raises BadTypeError for objects without one."""
    try:
        return len(value)
    except TypeError:
        raise BadTypeError(f"{name} is {short(value)}; give a list or an array") from None


def short(value: object) -> str:
    """Return a value as an error shows it: in one line, and cut off."""
    return " ".join(f"{value!r:.40}".split())


def nanoseconds(seconds: float) -> int:
    """Convert a timeout to nanoseconds. Raises BadValueError if it is out of range, and
    BadTypeError if it is not a number.
    """
    if type(seconds) is not float and not isinstance(seconds, Real):
        raise BadTypeError(
            f"a time must be a number of seconds, not {short(seconds)}; give a float"
        )
    if not 0 <= seconds <= _SECONDS_MAX:
        raise BadValueError(
            f"a time of {short(seconds)} seconds is out of range; give 0 to {_SECONDS_MAX:.0f}"
        )
    return int(seconds * 1e9)
