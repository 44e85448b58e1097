# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tests that are coroutines run on the event loop that the gateway uses."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

PATIENCE_S = 120.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from beluga.gateway import run

    names = pyfuncitem._fixtureinfo.argnames
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    run(_within(test))
    return True


async def _within(test: Any) -> None:
    await asyncio.wait_for(test, PATIENCE_S)
