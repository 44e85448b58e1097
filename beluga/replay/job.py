# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The job of a client process of a replay."""

from __future__ import annotations

import msgspec


class Job(msgspec.Struct, frozen=True):
    """A client's only argument, passed as JSON."""

    devices: list[str]
    trace: str
    block_size: int  # bytes
    compare: bool
