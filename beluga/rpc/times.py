# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Converts seconds to nanoseconds for C functions."""

from __future__ import annotations

from numbers import Real

from beluga.arguments import short
from beluga.errors import BadTypeError, BadValueError

_MAX_S = 1e9  # 31 years; C cannot represent much longer times


def nanoseconds(seconds: float) -> int:
    """Convert a timeout to nanoseconds. Raises BadValueError if it is out of range, and
    BadTypeError if it is not a number.
    """
    if type(seconds) is not float and not isinstance(seconds, Real):
        raise BadTypeError(
            f"a time must be a number of seconds, not {short(seconds)}; give a float"
        )
    if not 0 <= seconds <= _MAX_S:
        raise BadValueError(
            f"a time of {short(seconds)} seconds is out of range; give 0 to {_MAX_S:.0f}"
        )
    return int(seconds * 1e9)
