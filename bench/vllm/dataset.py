# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Questions about long texts, in the shape of LV-Eval, made of random tokens.

A context is asked about several times. Each time a leading part of it stands there as before; what
follows is that question's own: its passages, among others to distract, and the question itself. The
leading part is as long as makes about 30 % of all whole blocks a repetition of earlier ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .arm import whole_blocks
from .prompts import prompt

REUSE = 0.3

_ENGINE_PROMPTS = 3  # of the longest ones: an engine has room for fewer
_ROUND = 256  # the largest blocks that are measured
_TOKENS = 33 << 10  # of all prompts of one length, about


def cut(length: int) -> int:
    """The length of prompts that are to have ``length`` tokens: whole blocks, and one token.

    Then blocks of every size leave one token to compute when all else is found.
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
        """The prompts, as token ids, by context."""
        return [
            [self._prompt(context, question) for question in range(self.question_count)]
            for context in range(self.context_count)
        ]

    @property
    def prompts(self) -> list[list[int]]:
        """All of them, those of a context together."""
        return [tokens for context in self.contexts for tokens in context]

    def shuffled(self, seed: int) -> list[list[int]]:
        """All of them, in another order."""
        prompts = self.prompts
        random.Random(seed).shuffle(prompts)  # noqa: S311  repeatable, no secret
        return prompts

    @property
    def full_tokens(self) -> int:
        """Tokens of all requests that can be found once all was computed."""
        return self.request_count * whole_blocks(self.length, self.block_tokens)

    @property
    def request_count(self) -> int:
        """How many requests."""
        return self.context_count * self.question_count

    @property
    def repeated_tokens(self) -> int:
        """How many of those stand in an earlier request already."""
        return self.context_count * (self.question_count - 1) * self.shared_tokens

    @property
    def fresh_tokens(self) -> int:
        """How many must be computed, and then lie in a pool."""
        return self.full_tokens - self.repeated_tokens

    @property
    def shared_tokens(self) -> int:
        """The part that the requests about one context begin with, in whole blocks."""
        if self.question_count < 2:
            return 0
        share = min(1.0, REUSE * self.question_count / (self.question_count - 1))
        blocks = whole_blocks(self.length, self.block_tokens) // self.block_tokens
        return round(share * blocks) * self.block_tokens

    def _prompt(self, context: int, question: int) -> list[int]:
        shared = prompt(self.shared_tokens, self._seed(context, 0))
        return shared + prompt(self.length - len(shared), self._seed(context, 1 + question))

    def _seed(self, *place: int) -> int:
        """A seed for this place in this set that no other place and length has."""
        number = self.seed
        for part in (self.length, *place):
            number = number << 20 | part
        return number


def datasets_of(
    lengths: Sequence[int], block_tokens: int, *, contexts_max: int = 4, seed: int
) -> list[Dataset]:
    """The requests of each length, cut, the shortest first: fewer of those that take long."""
    datasets = []
    for length in sorted({cut(length) for length in lengths}):
        questions = min(max(_TOKENS // length, 2), 4)
        contexts = min(max(_TOKENS // (length * questions), 1), contexts_max)
        datasets.append(Dataset(length, contexts, questions, block_tokens, seed))
    return datasets


def warm_up_of(datasets: Sequence[Dataset]) -> Dataset:
    """Short prompts that none of them has, enough to go through all of an engine's KV memory."""
    shortest, longest = datasets[0], datasets[-1]
    count = -(-_ENGINE_PROMPTS * longest.length // shortest.length)
    return replace(shortest, context_count=count, question_count=1, seed=shortest.seed + 1)


def pool_tokens(datasets: Sequence[Dataset]) -> int:
    """The room for all that they leave in a pool, and some to spare: nothing is evicted."""
    return sum(dataset.fresh_tokens for dataset in datasets) * 3 // 2
