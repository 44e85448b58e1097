# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Costs computed for all workers at once equal those computed one by one, to the last bit."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_policies import PLAIN, estimate, plain_choice

from beluga.errors import AllWorkersBusyError
from beluga.router import (
    Candidate,
    Candidates,
    CostEstimator,
    Load,
    Overlap,
    Query,
    Worker,
    costs,
    make_policy,
)
from beluga.router.policy import Usual
from beluga.router.tracker import ActivePrefills

COUNTS = st.one_of(st.integers(0, 40), st.integers(0, 1 << 20))
SECONDS = st.one_of(st.just(0.0), st.floats(0, 1e4), st.floats(0, 1e-3))
SHARES = st.floats(0, 1)

LOADS = st.builds(
    Load,
    request_active_slots=COUNTS,
    request_total_slots=COUNTS,
    kv_active_blocks=COUNTS,
    kv_total_blocks=COUNTS,
    num_requests_waiting=COUNTS,
    gpu_cache_usage_perc=SHARES,
    active_requests=COUNTS,
    active_prefill_tokens=COUNTS,
    prefill_s=SECONDS,
    active_decode_blocks=COUNTS,
    outstanding_tokens=COUNTS,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Query, list[Candidate]]:
    size = draw(st.sampled_from([1, 16, 512]))
    isl = draw(st.integers(1, 300_000))
    hashes = range(draw(st.integers(0, isl // size)))
    mean = draw(st.one_of(st.just(0.0), st.floats(1, 1e4)))  # a prompt has a block at least
    usual = Usual(
        mean, draw(st.floats(0, 1e4)), draw(st.integers(0, 1000)),
        draw(SECONDS), draw(st.floats(0, 1e8)),
    )  # fmt: skip
    blocks = st.integers(0, max(isl // size, 1))
    candidates = [
        Candidate(
            Worker(number),
            load,
            Overlap(draw(blocks), draw(blocks), draw(blocks), draw(blocks)),
            draw(st.integers(0, len(hashes))),
            draw(st.floats(0, 100)),
        )
        for number, load in enumerate(draw(st.lists(LOADS, min_size=1, max_size=6)))
    ]
    return Query(isl, size, hashes, hashes, usual=usual), candidates


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in PLAIN),
    ("linear", {"decay": 2.0, "temperature": 0.7, "request_cost": 1.5, "shared_credit": 0.5}),
    ("linear", {"track_prefill": False, "decode_router": True}),
    ("lmetric", {"decay": 0.3, "temperature": 0.7}),
    ("cache-aware", {"balance_abs": 2, "balance_rel": 1.01, "usage_spread": 0.5}),
    ("min-ttft", {"fetch_threshold": 1.5}),
    *(
        ("least-cost", {"estimator": CostEstimator(costs=model, step_tokens=700)})
        for model in costs.MODELS.values()
    ),
]


@pytest.mark.parametrize(("name", "chosen"), SETTINGS)
@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_a_policy_chooses_as_in_plain_python(
    name: str, chosen: dict[str, Any], case: tuple[Query, list[Candidate]]
) -> None:
    query, candidates = case
    policy = make_policy(name, seed=1, **chosen)
    try:
        index, of_all, prefill_s = plain_choice(policy, query, candidates)
    except ZeroDivisionError:  # each worker is full
        with pytest.raises(AllWorkersBusyError):
            policy.choose(query, candidates)
        return
    choice = policy.choose(query, candidates)
    assert choice.worker == candidates[index].worker
    assert choice.overlap == candidates[index].overlap
    assert list(choice.costs) == of_all  # without a tolerance
    assert choice.prefill_s == prefill_s


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_an_estimate_is_that_of_plain_python(case: tuple[Query, list[Candidate]]) -> None:
    query, candidates = case
    estimator = CostEstimator(step_tokens=900, host_bytes_per_s=3e9)
    for fetched, candidate in enumerate(candidates):
        assert estimator(query, candidate, fetched) == estimate(
            estimator, query, candidate, fetched
        )


@given(case=cases())
def test_candidates_in_a_table_are_the_same_candidates(
    case: tuple[Query, list[Candidate]],
) -> None:
    _, candidates = case
    table = Candidates.of(candidates)
    assert list(table) == candidates
    assert table[-1] == candidates[-1]
    assert table[1:] == candidates[1:]
    assert Candidates.of(table) is table
    for name in (field.name for field in dataclasses.fields(Overlap)):
        assert table.counts(name) == [getattr(candidate.overlap, name) for candidate in candidates]
    with pytest.raises(IndexError):
        table[len(candidates)]


class PlainPrefills:
    """ActivePrefills, computed from the requests only."""

    def __init__(self) -> None:
        self.waiting: dict[Hashable, tuple[int, float | None]] = {}
        self.seconds = 0.0
        self.since = 0.0

    def add(self, request: Hashable, tokens: int, duration_s: float | None, now: float) -> None:
        self.since = self.since if self.waiting else now
        self.waiting[request] = (tokens, duration_s)
        self.seconds += duration_s or 0.0

    def remove(self, request: Hashable, now: float) -> None:
        self.since = now if request == next(iter(self.waiting)) else self.since
        self.seconds -= self.waiting.pop(request)[1] or 0.0

    def left(self, now: float) -> int:
        if not self.waiting:
            return 0
        total = sum(tokens for tokens, _ in self.waiting.values())
        tokens, duration_s = next(iter(self.waiting.values()))
        if duration_s is None:
            return total
        elapsed = max(now - self.since, 0.0)
        done = tokens * elapsed / duration_s if duration_s > 0 else float(tokens)
        if any(duration is None for _, duration in self.waiting.values()):
            done = min(done, tokens)
        return max(round(total - done), 0)

    def seconds_left(self, now: float) -> float:
        if not self.waiting:
            return 0.0
        oldest = next(iter(self.waiting.values()))[1] or 0.0
        return self.seconds - oldest + abs(self.since + oldest - now)


DURATIONS = st.one_of(st.none(), st.floats(1e-6, 50), st.sampled_from([0.0, 1.5]))


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), COUNTS, DURATIONS, st.floats(0, 5), st.integers(0, 9)),
        max_size=30,
    )
)
def test_prefills_progress_as_in_plain_python(
    steps: list[tuple[bool, int, float | None, float, int]],
) -> None:
    ours, plain, now = ActivePrefills(), PlainPrefills(), 0.0
    for number, (adds, tokens, duration_s, passed, which) in enumerate(steps):
        now += passed
        if adds or not plain.waiting:
            ours.add(number, tokens, duration_s, now)
            plain.add(number, tokens, duration_s, now)
        else:
            request = list(plain.waiting)[which % len(plain.waiting)]
            ours.remove(request, now)
            plain.remove(request, now)
        for later in (now, now + passed / 3, now + 7):
            assert ours.left(later) == plain.left(later)
            assert ours.seconds_left(later) == plain.seconds_left(later)
