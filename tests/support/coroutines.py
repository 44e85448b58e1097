# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tests that are coroutine functions: a conftest.py chooses the event loop that runs them."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

PATIENCE_S = 120.0


def call(test: pytest.Function, run: Callable[[Coroutine[Any, Any, None]], Any]) -> bool | None:
    """Run a test if it is a coroutine function. For the hook ``pytest_pyfunc_call``."""
    if not inspect.iscoroutinefunction(test.obj):
        return None
    arguments = {name: test.funcargs[name] for name in test._fixtureinfo.argnames}
    run(_within(test.obj(**arguments)))
    return True


async def _within(test: Coroutine[Any, Any, None]) -> None:
    await asyncio.wait_for(test, PATIENCE_S)
