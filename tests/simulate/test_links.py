# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Links that copies share: the reference's examples, and conservation."""

from __future__ import annotations

from random import Random

import pytest

from beluga.simulate.links import Clock, Links

GB, MB = 1e9, 1e6


def ends(speeds: list[float], copies: list[tuple[float, float, tuple[int, ...]]]) -> list[float]:
    """Return when copies of (start, bytes, links) end, in their order."""
    links = Links(speeds)
    ended = [0.0] * len(copies)

    def start(now: float, number: int) -> None:
        def then(when: float) -> None:
            ended[number] = when

        links.start(now, copies[number][1], copies[number][2], then)

    arrivals = sorted((at, number) for number, (at, _, _) in enumerate(copies))
    Clock((links,)).run(iter(arrivals), start)
    return ended


@pytest.mark.parametrize(
    ("copies", "expected_ms"),
    [
        ([(0.0, MB)], [1]),
        ([(0.0, MB)] * 2, [2, 2]),
        ([(0.0, MB), (0.0005, MB)], [1.5, 2]),
        ([(0.0, MB)] * 10, [10] * 10),
    ],
)
def test_processor_sharing_matches_the_examples(
    copies: list[tuple[float, float]], expected_ms: list[float]
) -> None:
    found = ends([GB], [(at, size, (0,)) for at, size in copies])
    assert [1e3 * at for at in found] == pytest.approx(expected_ms, rel=1e-3)


def test_the_remaining_time_is_the_sum_of_the_others_remaining_bytes() -> None:
    """The deadline of r is the sum over j of min(r_j, r) / B."""
    random = Random(1)
    sizes = [random.uniform(1, 50) * MB for _ in range(12)]
    expected = [sum(min(other, size) for other in sizes) / GB for size in sizes]
    assert ends([GB], [(0.0, size, (0,)) for size in sizes]) == pytest.approx(expected, rel=1e-3)


def test_copies_have_the_speed_of_their_slowest_link() -> None:
    # Two copies use the slow shared link 0. The third has link 1 except for what the second takes
    # of it.
    found = ends([2 * GB, 4 * GB], [(0, GB, (0,)), (0, GB, (0, 1)), (0, 3 * GB, (1,))])
    assert found == pytest.approx([1, 1, 1], rel=1e-3)


def test_links_are_work_conserving() -> None:
    random = Random(2)
    copies = [(random.uniform(0, 0.01), random.uniform(1, 9) * MB, (0,)) for _ in range(200)]
    found = ends([GB], copies)
    assert max(found) == pytest.approx(sum(size for _, size, _ in copies) / GB, abs=0.011)
    assert all(
        end - at >= size / GB * 0.999 for end, (at, size, _) in zip(found, copies, strict=True)
    )


def test_links_report_the_cost_of_sharing() -> None:
    links = Links([GB])
    ended: list[float] = []
    for _ in range(2):
        links.start(1.0, MB, (0,), ended.append)
    links.end(1.001)  # no copy has made progress yet
    assert (ended, links.count) == ([], 0)
    links.end(links.finish)
    assert ended == pytest.approx([1.002] * 2)
    assert (links.count, links.moved) == (2, [2 * MB])
    assert (links.busy_s, links.waited_s) == (pytest.approx(0.004), pytest.approx(0.002))
    assert links.finish == float("inf")


def test_a_single_copy_does_not_wait() -> None:
    links = Links([2 * GB])
    slow = links.add_link(GB / 3)
    links.start(0.0, MB, (0, slow), lambda when: None)
    assert links.finish == pytest.approx(0.003)
    links.end(links.finish)
    assert (links.count, links.waited_s) == (1, 0)
    assert (slow, links.speeds, links.moved) == (1, [2 * GB, GB / 3], [MB, MB])


def test_bandwidth_left_by_a_slow_link_is_shared_by_the_others() -> None:
    links = Links([4 * GB, GB, 3 * GB])
    for route in ((0, 1), (0, 1), (0, 2), (0, 2), (2,)):
        links.start(0.0, GB, route, lambda when: None)
    assert [copy.rate / GB for copy in links.copies] == pytest.approx([0.5, 0.5, 1, 1, 1])


def test_events_are_ordered_by_time_then_by_creation() -> None:
    links = Links([GB])
    clock = Clock((links,))
    seen: list[tuple[str, float]] = []

    def arrive(now: float, name: str) -> None:
        seen.append((name, now))
        if name == "arrival":
            for event in ("event", "later"):
                clock.at(3.0, lambda when, what: seen.append((what, when)), event)
            links.start(now, GB, (0,), lambda when: seen.append(("copy", when)))
            links.start(now, 2 * GB, (0,), lambda when: seen.append(("last copy", when)))

    assert clock.run(iter([(1.0, "arrival"), (3.0, "second")]), arrive) == 4
    assert seen == [("arrival", 1), ("second", 3), ("event", 3), ("later", 3), ("copy", 3),
                    ("last copy", 4)]  # fmt: skip


def test_the_clock_does_not_advance_without_events() -> None:
    assert Clock(()).run(iter(()), lambda now, request: None) == 0
