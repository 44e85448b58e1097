# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""CPUs near a pool's devices."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from beluga.pool.device import near_cpus, parse_cpulist, run_near


def make_node(root: Path, node: int, cpulist: str) -> None:
    (root / f"node{node}").mkdir()
    (root / f"node{node}" / "cpulist").write_text(cpulist + "\n")


def test_cpulist_has_ranges_and_single_numbers() -> None:
    assert parse_cpulist("0-2,7,9-9\n") == {0, 1, 2, 7, 9}
    assert parse_cpulist("\n") == set()


def test_local_cpus_are_those_of_all_specified_nodes(tmp_path: Path) -> None:
    make_node(tmp_path, 0, "0-1")
    make_node(tmp_path, 2, "4")
    assert near_cpus({0, 2}, root=tmp_path) == {0, 1, 4}
    assert near_cpus({5}, root=tmp_path) == set()


def test_run_near_pins_only_the_calling_thread(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    cpu = min(before)
    make_node(tmp_path, 0, str(cpu))
    seen: list[set[int]] = []

    def work() -> None:
        assert run_near({0}, root=tmp_path) == {cpu}
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{cpu}]
    assert os.sched_getaffinity(0) == before


def test_run_near_does_nothing_without_a_known_node(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    assert run_near(set(), root=tmp_path) == set()
    assert os.sched_getaffinity(0) == before
