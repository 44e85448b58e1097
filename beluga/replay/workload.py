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
from pathlib import Path

from beluga.replay.trace import TraceRequest

BUNDLED = Path(__file__).with_name("conversations.jsonl")
"""The trace that commands read if none is named; scripts/dev/gen_trace.py makes it."""


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
