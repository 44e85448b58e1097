# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The comparison of eviction and admission, on small traces."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from beluga_bench.harness.recorded import read_record
from beluga_bench.studies.tiers_policy import (
    DEFAULT,
    Result,
    bound,
    compare,
    conversations,
    judge,
    main,
    shared_prompt,
    without_reuse,
)

from beluga.simulate import Trace, TraceEntry, load_trace, make_trace
from beluga.tiers.admission import TRIAL

TRACES = Path(__file__).resolve().parent.parent.parent.parent / "shared/traces"


def best_of_all(trace: Trace, capacity: int) -> float:
    """Return the largest number of leading hits that any eviction policy can reach."""
    requests = [set(blocks) for blocks in trace.blocks()]
    leads = trace.blocks()
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for blocks, members in zip(leads, requests, strict=True):
        after: dict[frozenset[int], int] = {}
        for inside, hits in states.items():
            lead = next((n for n, b in enumerate(blocks) if b not in inside), len(blocks))
            have = sorted(inside | members)
            for kept in combinations(have, min(capacity, len(have))):
                key = frozenset(kept)
                after[key] = max(after.get(key, 0), hits + lead)
        states = after
    return max(states.values()) / sum(trace.count)


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_exceeds_the_bound_and_one_reaches_it(seed: int) -> None:
    random = Random(seed)
    prompts = []
    for number in range(7):
        tree, count = random.randrange(3), random.randint(1, 3)
        prompts.append(
            TraceEntry(float(number), 16 * count, 1, [tree * 10 + n for n in range(count)])
        )
    trace = make_trace("small", 16, prompts, 1.0)
    for capacity in (3, 4, 5):
        assert bound(trace, capacity) == pytest.approx(best_of_all(trace, capacity))


def test_no_pair_of_policies_exceeds_the_bound() -> None:
    results = list(compare(conversations(), (0.1,), (0.1, 1.0)))
    assert all(0 < result.hit <= result.bound for result in results)
    (row,) = judge(results)
    assert row["trace"] == "conversations"
    assert row["best_hit"] == pytest.approx(
        max(
            sum(r.hit for r in results if (r.eviction, r.admission) == pair and r.disk) / 2
            for pair in {(r.eviction, r.admission) for r in results if r.disk}
        ),
        abs=1e-4,
    )


def of(results: list[Result], pair: tuple[str, str]) -> Result:
    return next(r for r in results if (r.eviction, r.admission) == pair and r.disk)


def test_by_default_a_workload_without_reuse_writes_only_the_trial() -> None:
    trace = without_reuse(1000)
    results = list(compare(trace, (0.1,), (1.0,)))
    assert of(results, DEFAULT).written * trace.id_count <= TRIAL + 1
    assert of(results, ("lru", "always")).written == 1.0


@pytest.mark.long
def test_by_default_a_workload_with_only_a_shared_prompt_stops_saving() -> None:
    results = list(compare(shared_prompt(), (0.02,), (1.0,)))
    assert of(results, DEFAULT).written < 0.1
    assert of(results, DEFAULT).hit == of(results, ("lru", "always")).hit


def test_the_smoke_run_writes_its_results(tmp_path: Path) -> None:
    main("--smoke", str(tmp_path / "out.json"))
    report = read_record(tmp_path / "out.json")
    assert {row["trace"] for row in report["rows"]} == {"conversations", "without reuse"}
    assert len(report["judged"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the traces")
def test_the_default_is_near_the_best_on_the_conversation_trace() -> None:
    trace = load_trace(TRACES / "mooncake" / "conversation_trace.jsonl")
    (row,) = judge(list(compare(trace, (0.1,), (0.3, 1.0))))
    assert isinstance(row["ratio"], float)
    assert row["ratio"] >= 0.95
