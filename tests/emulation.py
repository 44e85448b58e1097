# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a test may expect under an emulator of another CPU (``scripts/test-aarch64``)."""

from __future__ import annotations

import os

import pytest

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
"""How much longer a wait may take than on a CPU."""

EMULATED = PATIENCE > 1


def needs_a_cpu(reason: str) -> pytest.MarkDecorator:
    """Skip a test under an emulator."""
    return pytest.mark.skipif(EMULATED, reason=f"under qemu-user: {reason}")
