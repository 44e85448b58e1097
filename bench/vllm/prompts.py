# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prompts as token ids: random, repeatable, and without a common prefix unless one is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator

from .model import VOCABULARY

_FIRST_ORDINARY = 3  # below are the special tokens


def prompt(length: int, seed: int) -> list[int]:
    """``length`` tokens; another seed has other tokens from the first block on."""
    tokens = random.Random(seed)  # noqa: S311  repeatable, no secret
    return [tokens.randrange(_FIRST_ORDINARY, VOCABULARY) for _ in range(length)]


def prompts(length: int, seed: int) -> Iterator[list[int]]:
    """Prompts of that length without end, each a new one."""
    while True:
        yield prompt(length, seed)
        seed += 1
