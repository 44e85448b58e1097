# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Times as C takes them."""

from __future__ import annotations

from beluga.errors import BadRequestError

_MAX_S = 1e9  # 31 years; later is no instant of C's


def nanoseconds(seconds: float) -> int:
    """Of a time that somebody waits. Raises BadRequestError for what is none."""
    if not 0 <= seconds <= _MAX_S:
        raise BadRequestError(f"times are from 0 to {_MAX_S:.0f} seconds, not {seconds!r}")
    return int(seconds * 1e9)
