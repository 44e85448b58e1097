# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Pools that crash tests fill with real bytes."""

from pathlib import Path

import pytest


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    return [shm / "a", shm / "b"]


@pytest.fixture(params=[pytest.param("hardware", marks=pytest.mark.long), "software"])
def coherence(request: pytest.FixtureRequest) -> str:
    return str(request.param)
