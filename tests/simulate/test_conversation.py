# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The claim on a real trace, and the reference's table in docs/understand/benchmarks.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from beluga.simulate import PRESETS, Options, Row, Trace, load_trace, simulate

TRACES = Path(__file__).resolve().parent.parent.parent.parent / "shared/traces"

# The mean TTFT in seconds at twice the trace's speed, and the hit rate if it is given.
TABLE = {
    ("least-tokens", "split"): (8.66, 0.07),
    ("linear", "split"): (2.94, 0.16),
    ("min-ttft", "split"): (2.07, 0.19),
    ("least-tokens", "pool"): (1.86, 0.26),
    ("linear", "pool"): (1.85, None),
    ("min-ttft", "pool"): (1.59, None),
    ("round-robin", "pool"): (8.54, None),
}


@pytest.fixture(scope="module")
def trace() -> Trace:
    path = TRACES / "mooncake/conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the checkout")
    return load_trace(path)


def mean(trace: Trace, options: Options, policy: str, memory: str) -> Row:
    return simulate(trace, options, policies=[policy], memories=[memory])[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "memory"), TABLE)
def test_the_references_replay_is_reproduced(trace: Trace, policy: str, memory: str) -> None:
    ttft_s, hit_rate = TABLE[policy, memory]
    row = mean(trace, PRESETS["feasibility"](Options(speed=2.0)), policy, memory)
    assert row.ttft_mean_s == pytest.approx(ttft_s, rel=0.15)
    if hit_rate is not None:
        assert row.hit_rate == pytest.approx(hit_rate, abs=0.02)


@pytest.mark.slow
def test_load_balancing_on_a_pool_matches_cache_aware_routing_and_beats_split_dram(
    trace: Trace,
) -> None:
    options = Options(speed=2.0)
    found = {
        (policy, memory): mean(trace, options, policy, memory).ttft_mean_s
        for policy, memory in (
            ("least-tokens", "pool"),
            ("linear", "pool"),
            ("linear", "split"),
            ("cache-aware", "split"),
            ("min-ttft", "split"),
        )
    }
    oblivious = found["least-tokens", "pool"]
    assert oblivious <= 1.1 * found["linear", "pool"]
    assert oblivious < min(ttft for (_, memory), ttft in found.items() if memory == "split")
