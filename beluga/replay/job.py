# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a client process of a replay is told to do."""

from __future__ import annotations

import msgspec


class Job(msgspec.Struct, frozen=True):
    """Passed as JSON, the only argument of a client."""

    devices: list[str]
    trace: str
    block_size: int  # bytes
    compare: bool
