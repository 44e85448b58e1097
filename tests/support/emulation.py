# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The amount of a test's work, and its timeouts: under an emulator of another CPU
(``scripts/ci/test-aarch64``), in a quick run, and in a full one (``TEST_EFFORT=full``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # processes of tests import this module, too, so it has no imports of its own
    from collections.abc import Iterable

    import pytest
    from _pytest.mark import ParameterSet

_Case = TypeVar("_Case")

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
"""Factor of timeouts relative to a real CPU."""

EMULATED = PATIENCE > 1

FULL = os.environ.get("TEST_EFFORT") == "full"

FEWEST = 5
_FRACTION = 10 if EMULATED else 1 if FULL else 4


def fewer(count: int) -> int:
    """Return how many examples, seeds or rounds a test has: ``count`` in a full run, a quarter in a
    quick one, a tenth under an emulator; but at least ``FEWEST``.
    """
    return max(count // _FRACTION, min(count, FEWEST))


def share(cases: Iterable[_Case], number: int) -> list[_Case]:
    """Return the cases for one of several tests with the same cases, by its number: all in a full
    run, every fourth in a quick one.
    """
    return list(cases)[number % _FRACTION :: _FRACTION]


def long(*case: object) -> ParameterSet:
    """A case that only full runs include, because the others cover most of it."""
    import pytest

    return pytest.param(*case, marks=pytest.mark.long)


def lighten() -> None:
    """Set Hypothesis's default number of examples; without a deadline under an emulator."""
    if _FRACTION > 1:
        from hypothesis import settings

        limit = {"deadline": None} if EMULATED else {}
        settings.register_profile("light", max_examples=fewer(100), **limit)
        settings.load_profile("light")


def needs_a_cpu(reason: str) -> pytest.MarkDecorator:
    """Skip a test under an emulator."""
    import pytest

    return pytest.mark.skipif(EMULATED, reason=f"under qemu-user: {reason}")
