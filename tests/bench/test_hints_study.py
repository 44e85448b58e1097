# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The study of hints on sessions with pauses: LRU, hints and Belady's MIN, on generated
sessions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from beluga_bench.harness.recorded import read_record
from beluga_bench.studies.hints import NONE, Strategy, made_sessions, main, run, steps_of
from beluga_bench.studies.tiers_policy import bound

from beluga.simulate import found_shares


@pytest.fixture(scope="module")
def made() -> tuple[object, ...]:
    return steps_of(made_sessions())


def test_without_hints_a_pool_nearly_matches_simulated_lru(made: tuple[object, ...]) -> None:
    """A server's pool has used what was found before it stores the rest, and evicts it first."""
    steps, trace = made
    for share in (0.3, 0.6):  # the longest prompt fits
        hit, favored, refused = run(steps, trace, share)
        best = found_shares(trace, [int(share * trace.id_count)])[0]
        assert best - 0.02 < hit <= best
        assert (favored, refused) == (0, 0)


@pytest.mark.parametrize(
    "strategy",
    [NONE, Strategy(60.0), Strategy(600.0, left=True, end=True), Strategy(end=True, turn=True)],
    ids=str,
)
def test_no_strategy_exceeds_the_bound_or_its_budget(
    made: tuple[object, ...], strategy: Strategy
) -> None:
    steps, trace = made
    for budget in (0.0, 0.25, 0.9):
        hit, favored, _ = run(steps, trace, 0.2, budget=budget, strategy=strategy)
        assert 0 < hit <= bound(trace, int(0.2 * trace.id_count))
        assert favored <= budget


def test_a_session_that_releases_blocks_at_its_end_frees_space() -> None:
    waits, ends, begins = made_sessions(3, 2)
    for session, times in (waits, (0, 100)), (ends, (40, 50)), (begins, (60, 70)):
        for one, at_s in zip(session, times, strict=True):
            one.t, one.hash_ids = at_s, list(range(20))
    steps, trace = steps_of([waits, ends, begins])
    assert run(steps, trace, 0.8)[0] == 48 / 120
    assert run(steps, trace, 0.8, strategy=Strategy(end=True))[0] == 60 / 120


def test_the_smoke_run_writes_its_rows(tmp_path: Path) -> None:
    main("--smoke", str(tmp_path / "out.json"))
    report = read_record(tmp_path / "out.json")
    assert report["what"] == "simulated"
    rows = report["rows"]
    assert [row["policy"] for row in rows][:2] == ["lru", "left"]
    assert rows[-1]["policy"] == "belady"
    assert max(row["hit"] for row in rows) == rows[-1]["hit"]
