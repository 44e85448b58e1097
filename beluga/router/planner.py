# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The planner: advice on the number of workers of each role, from queues, KV usage and objectives.

It only advises: the simulator may apply the advice, ``beluga gateway`` logs it. The thresholds are
the defaults of Dynamo's load planner. With a pool, a worker that changes its role leaves no KV
behind, so a spare worker of one role is first offered to the other role.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["prefill", "decode", "both"]
Need: TypeAlias = Literal["more", "fewer", "as it is"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """The planner's objectives and thresholds; None disables one."""

    ttft_s: float | None = None
    between_tokens_s: float | None = None
    queue_high: float = 5.0  # mean number of waiting prompts per prefill worker
    queue_low: float = 0.2
    usage_high: float = 0.9  # share of the decode workers' KV memory
    usage_low: float = 0.5
    workers_min: int = 1  # for each role
    workers_max: int = 1 << 20  # for all roles together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The mean state of one role over the last interval. Times are 0 if nothing was served. With an
    unknown usage (None), memory does not change the size of a role.

    Workers that do both are one role, "both", which uses all fields.
    """

    workers: int
    queued: float = 0.0  # prompts that wait for prefill
    usage: float | None = None  # share of KV memory in use, 0..1
    ttft_s: float = 0.0
    between_tokens_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """A change by one worker, and its reason."""

    action: Literal["grow", "shrink", "re-role"]
    role: Role  # the role that grows or shrinks, or that a worker changes to
    reason: str

    def __str__(self) -> str:
        worker = "worker" if self.role == "both" else f"{self.role} worker"
        what = {
            "grow": f"add a {worker}",
            "shrink": f"remove one {worker}",
            "re-role": f"turn one into a {worker}",
        }
        return f"{what[self.action]}: {self.reason}"


def advise(seen: dict[Role, Seen], goals: Goals) -> list[Advice]:
    """Return at most one change per role: add a worker, remove one, or take one from the other
    role.
    """
    needs = {role: _need(role, state, goals) for role, state in seen.items()}
    total = sum(state.workers for state in seen.values())
    short = [role for role, (need, _) in needs.items() if need == "more"]
    sparing = [role for role, (need, _) in needs.items() if need == "fewer"]
    advice = []
    for role in short:
        reason = needs[role][1]
        if sparing:
            giver = sparing.pop()
            advice.append(Advice("re-role", role, f"{reason}; {giver} can spare one"))
        elif total < goals.workers_max:
            total += 1
            advice.append(Advice("grow", role, reason))
    advice += [Advice("shrink", role, needs[role][1]) for role in sparing]
    return advice


def _need(role: Role, state: Seen, goals: Goals) -> tuple[Need, str]:
    high, low = [], []
    waiting = state.queued / state.workers if state.workers else state.queued
    if role != "decode":
        if waiting > goals.queue_high or (not state.workers and state.queued):
            high.append(f"{waiting:.3g} prompts wait per worker")
        elif goals.ttft_s is not None and state.ttft_s > goals.ttft_s:
            high.append(f"TTFT is {state.ttft_s:.3g} s, but its objective is {goals.ttft_s:.3g} s")
        low.append((waiting < goals.queue_low, f"{waiting:.3g} prompts wait per worker"))
    if role != "prefill":
        usage = state.usage
        in_use = "" if usage is None else f"{usage:.0%} of KV memory is in use"
        if usage is not None and usage > goals.usage_high:
            high.append(in_use)
        elif goals.between_tokens_s is not None and state.between_tokens_s > goals.between_tokens_s:
            high.append(
                f"the time between tokens is {state.between_tokens_s:.3g} s, but its objective is "
                f"{goals.between_tokens_s:.3g} s"
            )
        low.append((usage is not None and usage < goals.usage_low, in_use))
    if high:
        return "more", "; ".join(high)
    if state.workers > goals.workers_min and all(idle for idle, _ in low):
        return "fewer", "; ".join(why for _, why in low)
    return "as it is", ""
