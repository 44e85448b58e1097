# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The planner's advice: thresholds, targets, and workers that change their role."""

from __future__ import annotations

import pytest

from beluga.router import Goals, Role, Seen, advise

CALM = {"prefill": Seen(workers=2, queued=2.0), "decode": Seen(workers=2, usage=0.7)}


def actions(goals: Goals | None = None, **roles: Seen) -> list[tuple[str, str]]:
    seen: dict[Role, Seen] = {**CALM, **roles}  # type: ignore[dict-item]
    return [(advice.action, advice.role) for advice in advise(seen, goals or Goals())]


def test_a_balanced_fleet_gets_no_advice() -> None:
    assert actions() == []


def test_long_queues_and_full_memory_add_workers() -> None:
    assert actions(prefill=Seen(workers=2, queued=11)) == [("grow", "prefill")]
    assert actions(prefill=Seen(workers=2, queued=10)) == []
    assert actions(decode=Seen(workers=2, usage=0.91)) == [("grow", "decode")]


def test_missed_objectives_add_workers() -> None:
    goals = Goals(ttft_s=0.5, between_tokens_s=0.05)
    late = Seen(workers=2, queued=2.0, ttft_s=0.6)
    assert actions(goals, prefill=late) == [("grow", "prefill")]
    assert actions(prefill=late) == []
    slow = Seen(workers=2, usage=0.7, between_tokens_s=0.06)
    assert actions(goals, decode=slow) == [("grow", "decode")]


def test_idle_roles_shrink_but_not_to_nothing() -> None:
    assert actions(prefill=Seen(workers=2)) == [("shrink", "prefill")]
    assert actions(decode=Seen(workers=2, usage=0.4)) == [("shrink", "decode")]
    assert actions(prefill=Seen(workers=1)) == []
    assert actions(decode=Seen(workers=2)) == []  # the usage of memory is unknown


def test_spare_workers_of_one_role_are_advised_for_the_other() -> None:
    found = actions(prefill=Seen(workers=2, queued=20), decode=Seen(workers=2, usage=0.1))
    assert found == [("re-role", "prefill")]
    seen: dict[Role, Seen] = {
        "prefill": Seen(workers=2, queued=20),
        "decode": Seen(workers=2, usage=0.1),
    }
    expected = "turn one into a prefill worker: 10 prompts wait per worker; decode can spare one"
    assert [str(advice) for advice in advise(seen, Goals())] == [expected]
    both = actions(prefill=Seen(workers=2), decode=Seen(workers=2, usage=0.95))
    assert both == [("re-role", "decode")]


def test_advice_is_bounded_by_the_size_of_the_fleet() -> None:
    goals = Goals(workers_max=5)
    full = {"prefill": Seen(workers=2, queued=20), "decode": Seen(workers=2, usage=0.95)}
    assert actions(goals, **full) == [("grow", "prefill")]
    assert actions(Goals(workers_max=4), **full) == []


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (Seen(workers=2, queued=20), ["add a worker: 10 prompts wait per worker"]),
        (Seen(workers=2, queued=0, usage=0.7), []),
        (
            Seen(workers=2, queued=0, usage=0.1),
            ["remove one worker: 0 prompts wait per worker; 10% of KV memory is in use"],
        ),
        (Seen(workers=0, queued=1), ["add a worker: 1 prompts wait per worker"]),
    ],
)
def test_workers_that_do_both_are_one_role(state: Seen, expected: list[str]) -> None:
    assert [str(advice) for advice in advise({"both": state}, Goals())] == expected
