# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs in several processes: the same rows in the same order, and no process remains."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from beluga.errors import SimulateError
from beluga.simulate import Options, TraceEntry, make_trace, simulate, sweep

TRACE = make_trace(
    "small", 16, [TraceEntry(n / 4, 16 * (n % 9) + 1, n % 5, range(n % 9)) for n in range(60)], 1.0
)
REQUESTED: dict[str, Any] = {"policies": ["least-cost", "linear", "random"], "seeds": 3}


def children() -> set[str]:
    """Return the child processes of this one, without multiprocessing's tracker of resources."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = {pid: Path("/proc", pid, "cmdline").read_text() for pid in pids}
    return {pid for pid, command in commands.items() if "resource_tracker" not in command}


def test_rows_are_the_same_in_the_same_order() -> None:
    cases = [Options(workers=3, speed=speed) for speed in (1.0, 40.0)]
    alone = sweep(TRACE, cases, courses=True, **REQUESTED)
    moves: list[tuple[int, int]] = []
    before = children()
    together = sweep(
        TRACE, cases, courses=True, processes=3, advance=lambda *at: moves.append(at), **REQUESTED
    )
    assert repr(together) == repr(alone)
    assert moves == [(done, 36) for done in range(1, 37)]
    assert children() == before


@pytest.mark.parametrize("count", [0, -1, 1 << 17])
def test_the_number_of_processes_has_a_range(count: int) -> None:
    with pytest.raises(SimulateError, match=f"processes is from 1 to 65536, not {count}"):
        simulate(TRACE, Options(), processes=count, **REQUESTED)


def test_no_more_processes_start_than_there_are_runs() -> None:
    started: set[str] = set()
    before = children()
    simulate(
        TRACE, Options(workers=1), policies=["random"], processes=100,
        advance=lambda *at: started.update(children() - before),
    )  # fmt: skip
    assert len(started) <= 2


def test_the_error_of_a_run_is_raised_and_no_process_is_left() -> None:
    """A tier that exceeds the memory fails in the child."""
    before = children()
    huge = dataclasses.replace(TRACE, id_count=1 << 45)
    with pytest.raises((SimulateError, OverflowError)) as alone:
        simulate(huge, Options(), **REQUESTED)
    with pytest.raises(type(alone.value), match=re.escape(str(alone.value))):
        simulate(huge, Options(), processes=2, **REQUESTED)
    assert children() == before


def test_a_killed_process_is_an_error() -> None:
    def kill(done: int, total: int) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    before = multiprocessing.active_children()
    with pytest.raises(SimulateError, match="before its run was done; use fewer"):
        simulate(TRACE, Options(), processes=2, advance=kill, **{**REQUESTED, "seeds": 30})
    assert multiprocessing.active_children() == before


_INTERRUPTED = """
import sys
from beluga.simulate import Options, TraceEntry, make_trace, simulate
prompts = [TraceEntry(n / 4, 9000, 500, range(500)) for n in range(2000)]
trace = make_trace("long", 16, prompts, 1.0)
def advance(done, total):
    print("one is done", flush=True)
try:
    simulate(trace, Options(workers=8), policies=["least-cost"], seeds=1000, processes=2,
             advance=advance)
except KeyboardInterrupt:
    import multiprocessing
    print(multiprocessing.active_children() or "none")
"""


def test_an_interrupt_ends_all_processes() -> None:
    """As a terminal does it: the signal goes to all processes of the group."""
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "one is done\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert out.splitlines()[-1] == "none"
    assert err == ""


def test_processes_end_if_their_parent_is_killed() -> None:
    code = _INTERRUPTED.replace(
        'print("one is done", flush=True)',
        "from multiprocessing import active_children\n"
        "    print(*(child.pid for child in active_children()), flush=True)",
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    process.kill()
    process.communicate()
    until = time.monotonic() + 30
    while alive := [pid for pid in pids if Path("/proc", pid).exists()]:
        assert time.monotonic() < until, alive
        time.sleep(0.05)
    assert len(pids) == 2
