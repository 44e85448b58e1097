# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How many steps a state machine of Hypothesis takes: a few seconds of them, or a million."""

import pytest
from hypothesis import HealthCheck, Phase, settings

from .emulation import fewer

_QUICK = settings(max_examples=fewer(60), stateful_step_count=50, deadline=None)
_MILLION = settings(
    max_examples=10_000,
    stateful_step_count=100,
    deadline=None,
    phases=(Phase.generate,),
    database=None,
    suppress_health_check=list(HealthCheck),
)
each_budget = pytest.mark.parametrize(
    "budget",
    [
        pytest.param(_QUICK, id="quick"),
        pytest.param(_MILLION, id="million", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
