# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Arguments of the public API: of their type, or refused in one line that names them."""

from __future__ import annotations

import operator
from typing import Any

from beluga.errors import BadTypeError


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


def count_of(name: str, value: Any) -> int:
    """Return the length of a sequence. Raises BadTypeError for objects without one."""
    try:
        return len(value)
    except TypeError:
        raise BadTypeError(f"{name} is {short(value)}; give a list or an array") from None


def short(value: object) -> str:
    """Return a value as an error shows it: in one line, and cut off."""
    return " ".join(f"{value!r:.40}".split())
