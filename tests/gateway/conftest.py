# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tests that are coroutines run on the event loop that the gateway uses."""

from __future__ import annotations

import pytest
from support import coroutines


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    def run(test: object) -> None:
        from beluga.gateway import run

        run(test)  # type: ignore[arg-type]

    return coroutines.call(pyfuncitem, run)
