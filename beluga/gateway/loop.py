# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The event loop of a gateway: uvloop's where it is installed, or else asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run to its end. The signals of ``asyncio.run`` mean the same."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
