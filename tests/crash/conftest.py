# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Pools that crash tests fill with real bytes."""

import pytest


@pytest.fixture(params=[pytest.param("hardware", marks=pytest.mark.long), "software"])
def coherence(request: pytest.FixtureRequest) -> str:
    return str(request.param)
