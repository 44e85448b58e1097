# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The event loop of a gateway: uvloop's if it is installed, otherwise asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` to its end. Signals are handled as by ``asyncio.run``."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
