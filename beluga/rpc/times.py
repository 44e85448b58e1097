# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Conversion of seconds to the nanoseconds that C functions take."""

from __future__ import annotations

from numbers import Real

from beluga.arguments import short
from beluga.errors import BadTypeError, BadValueError

_MAX_S = 1e9  # 31 years; C cannot represent much later times


def nanoseconds(seconds: float) -> int:
    """Return ``seconds``, the length of a wait, in nanoseconds. Raises BadValueError if it is out
    of range, and BadTypeError if it is no number.
    """
    if type(seconds) is not float and not isinstance(seconds, Real):
        raise BadTypeError(f"a time is a number of seconds, not {short(seconds)}; give a float")
    if not 0 <= seconds <= _MAX_S:
        raise BadValueError(f"times are from 0 to {_MAX_S:.0f} seconds; {short(seconds)} is not")
    return int(seconds * 1e9)
