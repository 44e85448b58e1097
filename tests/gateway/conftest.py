# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tests that are coroutines run on the event loop of the gateway; a fixture of short waits."""

from __future__ import annotations

import pytest
from support import coroutines


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    def run(test: object) -> None:
        from beluga.gateway import run

        run(test)  # type: ignore[arg-type]

    return coroutines.call(pyfuncitem, run)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at engines, and give them up, sooner."""
    for module, name, value in (
        ("health", "LOOK_S", 0.01),
        ("kv_events", "LOOK_S", 0.01),
        ("kv_events", "ALONE_S", 0.05),
        ("cache", "SILENT_S", 0.05),
    ):
        monkeypatch.setattr(f"beluga.gateway.{module}.{name}", value)
