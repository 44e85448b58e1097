# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The stream: it sends requests to an engine at given times, and runs in the engine's process.

The times of ``vllm.LLM`` begin when the engine receives a request, which does not happen during a
step that may take seconds. A user's wait begins when the request is sent, and so do the times here.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Reply = dict[str, Any]

_names = map("stream-{}".format, itertools.count())


@dataclass
class StreamRequest:
    """A request. Times are seconds since the stream began; ``tokens`` is the answer so far."""

    number: int
    sent_s: float
    first_s: float | None = None
    last_s: float = 0.0
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # from one token to the next

    def reply(self) -> Reply:
        """Return the times from sending to the first token, and from one token to the next:
        ``tpot_s`` is their mean.
        """
        first_s = self.last_s if self.first_s is None else self.first_s
        gaps = len(self.tokens) - 1
        return {
            "sent_s": self.sent_s,
            "ttft_s": first_s - self.sent_s,
            "tpot_s": (self.last_s - first_s) / gaps if gaps > 0 else None,
            "gaps_s": self.gaps_s,
            "ended_s": self.last_s,
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
        }


def stream(
    engine: Any,
    samplings: Sequence[Any],
    prompts: Sequence[list[int]],
    due_s: Sequence[float] | None,
    at_once: int,
) -> Reply:
    """Run all prompts, each with its sampling: at its time, or, without times, always ``at_once``
    of them.
    """
    waiting = deque(enumerate(prompts))
    running: dict[str, StreamRequest] = {}
    ended: list[StreamRequest] = []
    started = time.perf_counter()
    while waiting or running:
        now = time.perf_counter() - started
        while waiting and _may_start(waiting[0][0], now, due_s, at_once, len(running)):
            number, tokens = waiting.popleft()
            name = next(_names)
            engine.add_request(name, {"prompt_token_ids": tokens}, samplings[number])
            running[name] = StreamRequest(number, due_s[number] if due_s else now)
        if not running:
            assert due_s  # noqa: S101  without times, something runs
            time.sleep(max(0.0, due_s[waiting[0][0]] - now))
            continue
        for output in engine.step():
            _note(output, running, ended, time.perf_counter() - started)
    ended.sort(key=lambda current: current.number)
    return {
        "outputs": [current.reply() for current in ended],
        "elapsed_s": time.perf_counter() - started,
    }


def _may_start(
    number: int, now: float, due_s: Sequence[float] | None, at_once: int, running: int
) -> bool:
    return now >= due_s[number] if due_s else running < at_once


def _note(
    output: Any, running: dict[str, StreamRequest], ended: list[StreamRequest], now: float
) -> None:
    """Take a step's output for one request, which has all tokens so far."""
    current = running[output.request_id]
    before, current.tokens = len(current.tokens), list(output.outputs[0].token_ids)
    current.cached_tokens = output.num_cached_tokens or 0
    if current.tokens:
        if before:  # tokens of one step arrive together
            current.gaps_s += [now - current.last_s, *[0.0] * (len(current.tokens) - before - 1)]
        current.last_s = now
        current.first_s = now if current.first_s is None else current.first_s
    if output.finished:
        ended.append(running.pop(output.request_id))
