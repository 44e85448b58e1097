# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes that share their loads decide like one process with the same requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beluga.router import LoadTracker, Overlap, Query, SharedLoads, Worker
from beluga.router.worker import FIGURES

PROCESSES, SLOTS = 3, 8
WORKERS = [Worker(number) for number in range(4)]


def trackers() -> list[LoadTracker]:
    """Return one tracker for each process. A worker's slot differs from its number."""
    memory = bytearray(SharedLoads.size(PROCESSES, SLOTS))
    made = []
    for process in range(PROCESSES):
        shared = SharedLoads(memory, PROCESSES, SLOTS, process)
        for worker in WORKERS:
            shared.assign(worker, SLOTS - 1 - worker.worker_id)
        made.append(LoadTracker(WORKERS, shared=shared))
    return made


def query(number: int, tokens: int) -> Query:
    """Return a request whose blocks no other request has."""
    blocks = [number << 32 | block for block in range(tokens // 16)]
    return Query(tokens, 16, blocks, blocks)


Step = tuple[int, int, int, str]
STEPS = st.lists(
    st.tuples(
        st.integers(0, PROCESSES - 1),
        st.integers(0, len(WORKERS) - 1),
        st.integers(0, 300),
        st.sampled_from(("add", "prefill_done", "free")),
    ),
    max_size=40,
)


@pytest.mark.parametrize("predicted", [False, True])
@given(steps=STEPS)
def test_sums_of_processes_equal_those_of_one(steps: list[Step], predicted: bool) -> None:
    alone, several = LoadTracker(WORKERS), trackers()
    running: list[tuple[int, LoadTracker]] = []
    for number, (process, place, tokens, act) in enumerate(steps):
        if act == "add":
            prompt, prefill_s = query(number, tokens), 1.0 if predicted else None
            for tracker in (alone, several[process]):
                tracker.add(number, WORKERS[place], prompt, Overlap(), now=0.0, prefill_s=prefill_s)
            running.append((number, several[process]))
        elif running:
            request, tracker = running[tokens % len(running)]
            done: Callable[[LoadTracker], bool] = (
                (lambda one, name=request: one.prefill_done(name, 0.0))
                if act == "prefill_done"
                else (lambda one, name=request: one.free(name, 0.0))
            )
            assert done(tracker) == done(alone)
            if act == "free":
                running.remove((request, tracker))
    alone.refresh(0.0)
    for tracker in several:
        tracker.refresh(0.0)
        rows = tracker.states(WORKERS, ())
        for row, worker in zip(rows, WORKERS, strict=True):
            expected = alone.load(worker)
            for name in FIGURES:
                assert getattr(row.load, name) == pytest.approx(getattr(expected, name)), name
                assert getattr(tracker.load(worker), name) == pytest.approx(getattr(expected, name))


def test_prefills_of_other_processes_decrease_with_time() -> None:
    one, other, _ = trackers()
    one.add("a", WORKERS[0], query(1, 1600), Overlap(), now=10.0, prefill_s=2.0)
    other.refresh(11.0)
    load = other.load(WORKERS[0])
    assert (load.active_prefill_tokens, load.prefill_s) == (800, pytest.approx(1.0))
    assert other.loads[WORKERS[0]].active_requests == 0  # the router's own requests


def test_a_removed_worker_leaves_nothing_for_the_next_one_in_its_slot() -> None:
    one, other, _ = trackers()
    one.add("a", WORKERS[0], query(1, 160), Overlap())
    one.remove_worker(WORKERS[0])
    assert other.load(WORKERS[0]).active_requests == 0
    one.free("a")  # the request ends later
    assert other.load(WORKERS[0]).active_requests == 0
