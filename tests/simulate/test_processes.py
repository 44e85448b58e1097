# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs in several processes: the same rows in the same order, and no process remains."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from beluga.child import command
from beluga.errors import SimulateError
from beluga.simulate import Options, TraceEntry, make_trace, processes, run, simulate, sweep

TRACE = make_trace(
    "small", 16, [TraceEntry(n / 4, 16 * (n % 9) + 1, n % 5, range(n % 9)) for n in range(60)], 1.0
)
REQUESTED: dict[str, Any] = {"policies": ["least-cost", "linear", "random"], "seeds": 3}


def children() -> set[str]:
    """Return the child processes of this one."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


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


def test_no_more_processes_start_than_there_are_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    real = run.run_in_processes
    monkeypatch.setattr(
        run,
        "run_in_processes",
        lambda trace, jobs, count, advance: (
            started.append(count) or real(trace, jobs, count, advance)
        ),
    )
    simulate(TRACE, Options(workers=1), policies=["random"], processes=100)
    assert started == [2]


def test_the_error_of_a_run_is_raised_and_no_process_is_left() -> None:
    """A tier that exceeds the memory fails in the child."""
    before = children()
    huge = dataclasses.replace(TRACE, id_count=1 << 45)
    with pytest.raises((SimulateError, OverflowError)) as alone:
        simulate(huge, Options(), **REQUESTED)
    with pytest.raises(SimulateError) as together:
        simulate(huge, Options(), processes=2, **REQUESTED)
    if isinstance(alone.value, SimulateError):
        assert str(together.value) == str(alone.value)
    assert children() == before


def test_a_killed_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()

    class Killed(processes._Child):
        def send(self, what: object) -> None:
            super().send(what)
            if self.place >= 0:
                self._process.kill()

    monkeypatch.setattr(processes, "_Child", Killed)
    with pytest.raises(
        SimulateError, match="before its run was done: killed by SIGKILL; use fewer"
    ):
        simulate(TRACE, Options(), processes=2, **REQUESTED)
    assert children() == before


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
    print(open("/proc/self/task/" + str(__import__("os").getpid()) + "/children").read() or "none")
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


@pytest.mark.parametrize("sent", [0, 100], ids=["nothing", "a part of the trace"])
def test_a_child_ends_silently_if_its_parent_has_ended(sent: int) -> None:
    """The parent may be interrupted before it has sent the trace."""
    ended = subprocess.run(
        command("beluga.simulate.child"),
        input=pickle.dumps(TRACE)[:sent],
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
