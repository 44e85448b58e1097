# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The planner: advice on the number of workers, from queues, KV usage and objectives.

It only advises: the simulator may apply the advice, ``beluga gateway`` logs it. The thresholds are
the defaults of Dynamo's load planner. With a pool, a worker that leaves takes no KV with it.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """The planner's objectives and thresholds; None disables one."""

    ttft_s: float | None = None
    between_tokens_s: float | None = None
    queue_high: float = 5.0  # mean number of waiting prompts per worker
    queue_low: float = 0.2
    usage_high: float = 0.9  # share of the workers' KV memory
    usage_low: float = 0.5
    workers_min: int = 1
    workers_max: int = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The mean state of the workers over the last interval. Times are 0 if nothing was served. With
    an unknown usage (None), memory does not change their number.
    """

    workers: int
    queued: float = 0.0  # prompts that wait for prefill
    usage: float | None = None  # share of KV memory in use, 0..1
    ttft_s: float = 0.0
    between_tokens_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """A change by one worker (+1 or -1), and its reason."""

    change: int
    reason: str

    def __str__(self) -> str:
        return f"{'add a' if self.change > 0 else 'remove one'} worker: {self.reason}"


def advise(seen: Seen, goals: Goals) -> Advice | None:
    """Return the advice to add or remove a worker, or None."""
    high, usage = [], seen.usage
    waiting = seen.queued / seen.workers if seen.workers else seen.queued
    queue = f"{waiting:.3g} prompts wait per worker"
    in_use = "" if usage is None else f"{usage:.0%} of KV memory is in use"
    if waiting > goals.queue_high or (not seen.workers and seen.queued):
        high.append(queue)
    elif goals.ttft_s is not None and seen.ttft_s > goals.ttft_s:
        high.append(f"TTFT is {seen.ttft_s:.3g} s, but its objective is {goals.ttft_s:.3g} s")
    if usage is not None and usage > goals.usage_high:
        high.append(in_use)
    elif goals.between_tokens_s is not None and seen.between_tokens_s > goals.between_tokens_s:
        high.append(
            f"the time between tokens is {seen.between_tokens_s:.3g} s, but its objective is "
            f"{goals.between_tokens_s:.3g} s"
        )
    if high:
        return Advice(1, "; ".join(high)) if seen.workers < goals.workers_max else None
    idle = waiting < goals.queue_low and usage is not None and usage < goals.usage_low
    if idle and seen.workers > goals.workers_min:
        return Advice(-1, f"{queue}; {in_use}")
    return None
