# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a test may expect under an emulator of another CPU (``scripts/test-aarch64``)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes of tests import this module, too: it imports nothing for them
    import pytest

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
"""How much longer a wait may take than on a CPU."""

EMULATED = PATIENCE > 1

FEWEST = 5


def fewer(count: int) -> int:
    """Return how many examples, seeds or rounds a test has: under an emulator a tenth of ``count``,
    but at least ``FEWEST``. A CPU has them all.
    """
    return max(count // 10, min(count, FEWEST)) if EMULATED else count


def lighten() -> None:
    """Let Hypothesis try fewer examples where a test names no number, without a time limit."""
    if EMULATED:
        from hypothesis import settings

        settings.register_profile("emulated", max_examples=fewer(100), deadline=None)
        settings.load_profile("emulated")


def needs_a_cpu(reason: str) -> pytest.MarkDecorator:
    """Skip a test under an emulator."""
    import pytest

    return pytest.mark.skipif(EMULATED, reason=f"under qemu-user: {reason}")
