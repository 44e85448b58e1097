# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks a refusal: exactly this kind of error, in one line that helps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from beluga.errors import BelugaError


@contextlib.contextmanager
def refused(kind: type[BelugaError], *words: str) -> Iterator[None]:
    """Check that the block raises ``kind``, with a one-line text that has these words."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in text
    assert len(text) > 20
    for word in words:
        assert word in text
