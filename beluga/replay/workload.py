# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A generated workload: conversations of several turns that begin with one of a few system prompts.

Each turn's prompt is the whole conversation so far and a little more, as chat users send it. The
turns of many conversations arrive interleaved.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import count

import msgspec

from beluga.replay.trace import TraceRequest

_ANSWER_TOKENS = (32, 512)
DEFAULT_BLOCK_TOKENS = 512  # as in Mooncake's traces


def default_requests() -> list[TraceRequest]:
    """Return the trace of commands if none is named: 1,200 turns of 120 conversations, always the
    same.
    """
    answers = random.Random(1)  # noqa: S311  a workload, not a secret
    shape = Conversations(block_tokens=DEFAULT_BLOCK_TOKENS, turn_interval_ms=40_000.0)
    return [
        msgspec.structs.replace(request, output_length=answers.randint(*_ANSWER_TOKENS))
        for request in make_workload(shape)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The shape of a workload. Lengths are in blocks of ``block_tokens`` tokens."""

    conversation_count: int = 120
    turn_count: int = 10
    system_prompt_count: int = 3
    system_prompt_length: int = 12
    turn_length_max: int = 8
    turn_interval_ms: float = 500.0
    block_tokens: int = 16
    seed: int = 1


def make_workload(shape: Conversations) -> list[TraceRequest]:
    """Generate the requests, sorted by time. The same shape gives the same requests."""
    choice = random.Random(shape.seed)  # noqa: S311  a workload, not a secret
    fresh = count(1)
    prompts = [
        [next(fresh) for _ in range(shape.system_prompt_length)]
        for _ in range(shape.system_prompt_count)
    ]
    requests = []
    for _ in range(shape.conversation_count):
        blocks = list(choice.choice(prompts))
        time = choice.uniform(0, shape.turn_interval_ms * shape.turn_count)
        for _ in range(shape.turn_count):
            answer_length = choice.randint(1, shape.turn_length_max)
            blocks = blocks + [next(fresh) for _ in range(answer_length)]
            requests.append(
                TraceRequest(
                    timestamp=round(time),  # whole milliseconds, as in Mooncake's traces
                    input_length=len(blocks) * shape.block_tokens,
                    output_length=answer_length * shape.block_tokens,
                    hash_ids=blocks,
                )
            )
            time += choice.expovariate(1 / shape.turn_interval_ms)
    return sorted(requests, key=lambda request: request.timestamp)
