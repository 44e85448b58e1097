# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The threads that parse, tokenize and hash large prompts. They are separate from those of the
event loop, which resolves engines' host names: otherwise a flood of large prompts would fail every
health check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

COUNT = 4
_THREADS = ThreadPoolExecutor(COUNT, "beluga-prompt")


async def in_prompt_thread(call: Callable[[], T]) -> T:
    """Run ``call`` on one of these threads and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)
