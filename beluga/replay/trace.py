# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Request traces: which blocks each request's prompt consists of.

The format is Mooncake's JSONL: one object per line with ``timestamp`` (ms since the start),
``input_length`` and ``output_length`` (tokens) and ``hash_ids``. An id stands for a block of tokens
together with all blocks before it, so that equal ids mean equal content and an equal prefix.

A generated workload consists of conversations of several turns that begin with one of a few system
prompts. Each turn's prompt is the whole conversation so far and a little more, as chat users send
it. The turns of many conversations arrive interleaved.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import msgspec

from beluga.arguments import StrPath, path_of
from beluga.errors import TraceError

# a line with a million hash ids; a file that is not a trace may have no line ends
_LINE_SIZE_MAX = 16 << 20


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: StrPath) -> list[TraceRequest]:
    """Read the requests of a file in its order. Raises TraceError with the number of the wrong
    line.
    """
    path = path_of("path", path)
    decoder = msgspec.json.Decoder(TraceRequest)
    requests: list[TraceRequest] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(partial(lines.readline, _LINE_SIZE_MAX), b""), 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)  # noqa: PLW2901
                if len(line) == _LINE_SIZE_MAX:
                    raise TraceError(f"{path}:{number}: a line of {_LINE_SIZE_MAX} bytes or more")
                if not line.isspace():
                    requests.append(_decode(decoder, line, f"{path}:{number}"))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; name a trace in JSONL") from None
    if not requests:
        raise TraceError(f"{path} holds no requests")
    return requests


def write_trace(requests: Sequence[TraceRequest], path: StrPath) -> None:
    """Write a file that :func:`read_trace` can read."""
    path = path_of("path", path)
    encode = msgspec.json.Encoder().encode
    path.write_bytes(b"".join(encode(request) + b"\n" for request in requests))


def _decode(decoder: msgspec.json.Decoder[TraceRequest], line: bytes, where: str) -> TraceRequest:
    try:
        request = decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise TraceError(
            f"{where}: {error}; a line is an object with timestamp, input_length, output_length "
            "and hash_ids"
        ) from None
    if not all(0 <= block < 1 << 63 for block in request.hash_ids):
        raise TraceError(f"{where}: a hash id is below 0, or above 63 bits")
    return request


def unique_count(requests: Sequence[TraceRequest]) -> int:
    """Return how many different blocks the requests name."""
    return len(set().union(*(request.hash_ids for request in requests)))


def ideal_hit_rate(requests: Sequence[TraceRequest]) -> float:
    """Return the share of blocks that an unlimited cache has, if requests run one after another."""
    seen: set[int] = set()
    hit_count = 0
    for request in requests:
        for block in request.hash_ids:
            if block not in seen:
                break
            hit_count += 1
        seen.update(request.hash_ids)
    return hit_count / max(1, sum(len(request.hash_ids) for request in requests))


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
