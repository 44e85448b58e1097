# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prompts as token ids. They are random, repeatable, and have no common prefix."""

from __future__ import annotations

import random
from collections.abc import Iterator

from .model import VOCABULARY

_FIRST_ORDINARY = 3  # lower numbers are special tokens


def prompt(length: int, seed: int) -> list[int]:
    """Return ``length`` tokens. Another seed gives other tokens from the first block on."""
    tokens = random.Random(seed)  # noqa: S311  repeatable, no secret
    return [tokens.randrange(_FIRST_ORDINARY, VOCABULARY) for _ in range(length)]


def prompts(length: int, seed: int) -> Iterator[list[int]]:
    """Yield new prompts of that length without end."""
    while True:
        yield prompt(length, seed)
        seed += 1
