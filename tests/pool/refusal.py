# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks an error: exactly this type, with a helpful one-line message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from beluga.errors import BelugaError


@contextlib.contextmanager
def refused(kind: type[BelugaError], *words: str) -> Iterator[None]:
    """Check that the block raises ``kind``, with a one-line message that contains these words."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in text
    assert len(text) > 20
    for word in words:
        assert word in text
