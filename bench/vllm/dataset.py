# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The data set: questions about long texts, in the form of LV-Eval, made of random tokens.

Each context has several questions. Each prompt begins with the same part of the context,
followed by the question's own passages, distracting passages, and the question itself. The common
part is so long that about 30 % of all whole blocks repeat earlier ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .arm import whole_blocks
from .prompts import prompt

REUSE = 0.3

_ENGINE_PROMPTS = 3  # how many of the longest prompts fill more than an engine
_ROUND = 256  # the largest block size that is measured
_TOKENS = 33 << 10  # the approximate number of tokens in all prompts of one length


def cut(length: int) -> int:
    """Return the length of prompts for about ``length`` tokens: whole blocks, and one token.

    With this length, one token remains to be computed with every block size when all blocks are
    found.
    """
    return max(1, length // _ROUND) * _ROUND + 1


@dataclass(frozen=True)
class Dataset:
    """All requests of one length: ``question_count`` for each of ``context_count`` contexts."""

    length: int
    context_count: int
    question_count: int
    block_tokens: int
    seed: int

    @cached_property
    def contexts(self) -> list[list[list[int]]]:
        """The prompts as token ids, by context."""
        return [
            [self._prompt(context, question) for question in range(self.question_count)]
            for context in range(self.context_count)
        ]

    @property
    def prompts(self) -> list[list[int]]:
        """All prompts; those of a context are together."""
        return [tokens for context in self.contexts for tokens in context]

    def shuffled(self, seed: int) -> list[list[int]]:
        """Return all prompts in a random order."""
        prompts = self.prompts
        random.Random(seed).shuffle(prompts)  # noqa: S311  repeatable, no secret
        return prompts

    @property
    def full_tokens(self) -> int:
        """The tokens of all requests that can be found once everything was computed."""
        return self.request_count * whole_blocks(self.length, self.block_tokens)

    @property
    def request_count(self) -> int:
        """The number of requests."""
        return self.context_count * self.question_count

    @property
    def repeated_tokens(self) -> int:
        """How many of the full tokens are already in an earlier request."""
        return self.context_count * (self.question_count - 1) * self.shared_tokens

    @property
    def fresh_tokens(self) -> int:
        """How many tokens must be computed, and are then in a pool."""
        return self.full_tokens - self.repeated_tokens

    @property
    def shared_tokens(self) -> int:
        """How many tokens the requests about one context have in common, in whole blocks."""
        if self.question_count < 2:
            return 0
        share = min(1.0, REUSE * self.question_count / (self.question_count - 1))
        blocks = whole_blocks(self.length, self.block_tokens) // self.block_tokens
        return round(share * blocks) * self.block_tokens

    def _prompt(self, context: int, question: int) -> list[int]:
        shared = prompt(self.shared_tokens, self._seed(context, 0))
        return shared + prompt(self.length - len(shared), self._seed(context, 1 + question))

    def _seed(self, *position: int) -> int:
        """Return a seed that is unique for this place in this set and this length."""
        number = self.seed
        for part in (self.length, *position):
            number = number << 20 | part
        return number


def datasets_of(
    lengths: Sequence[int], block_tokens: int, *, contexts_max: int = 4, seed: int
) -> list[Dataset]:
    """Make the requests of each length, the shortest first. There are fewer of the longer ones."""
    datasets = []
    for length in sorted({cut(length) for length in lengths}):
        questions = min(max(_TOKENS // length, 2), 4)
        contexts = min(max(_TOKENS // (length * questions), 1), contexts_max)
        datasets.append(Dataset(length, contexts, questions, block_tokens, seed))
    return datasets


def warm_up_of(datasets: Sequence[Dataset]) -> Dataset:
    """Make short prompts that no data set has, enough to fill all of an engine's KV memory."""
    shortest, longest = datasets[0], datasets[-1]
    count = -(-_ENGINE_PROMPTS * longest.length // shortest.length)
    return replace(shortest, context_count=count, question_count=1, seed=shortest.seed + 1)


def pool_tokens(datasets: Sequence[Dataset]) -> int:
    """Return the size of a pool, in tokens, that holds everything with a reserve, so nothing is
    evicted.
    """
    return sum(dataset.fresh_tokens for dataset in datasets) * 3 // 2
