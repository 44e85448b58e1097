# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tests pass wherever they are started; what a process has once: the limit of its log, threads
with interrupts, the registry of metrics.
"""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from repo.test_tidy import ROOT, tracked
from support.commands import captured
from support.emulation import long
from support.virtual_clock import Clock

from beluga.limit import PERIOD_S, LogLimit, and_more, kind_of
from beluga.metrics import Distribution, Registry, prometheus_text
from beluga.threads import wait_for

# ---- The tests pass wherever they are started: under nohup, in a background, in an odd
# environment.


STOPPED = "tests/replay/test_replay.py::test_a_stopped_replay_leaves_nothing"
COMMANDS = "tests/cli/test_block_command.py"


def run_tests(selection: list[str], before: str, environment: dict[str, str], folder: Path) -> None:
    command = f'{before}; exec "$0" -m pytest -q -p no:cacheprovider "$@"'
    ended = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, *selection, "--basetemp", folder / "with space"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout


@pytest.mark.long
def test_signals_may_be_ignored(tmp_path: Path) -> None:
    """As nohup and background jobs of a shell do."""
    selection = [f"{STOPPED}[1-129]", f"{STOPPED}[2-130]"]
    run_tests(selection, "trap '' HUP INT", dict(os.environ), tmp_path)


@pytest.mark.slow
def test_commands_work_in_an_empty_environment(tmp_path: Path) -> None:
    """No HOME, no terminal, no locale, a strict umask, closed stdin."""
    bare = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    run_tests([COMMANDS], "umask 077; exec <&-", bare, tmp_path)


@pytest.mark.parametrize(("first", "status"), [("assert False", 1), long("pass", 2)])
def test_a_failure_before_an_interruption_counts(first: str, status: int, tmp_path: Path) -> None:
    """``scripts/check`` interrupts long steps, and treats status 1 as a failure."""
    tests = tmp_path / "test_it.py"
    tests.write_text(f"def test_a(): {first}\ndef test_b(): raise KeyboardInterrupt\n")
    ended = captured(
        [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", tmp_path, tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
    )
    assert ended.returncode == status, ended.stdout


# ---- The first message of each kind is logged at once, and no file has a limit of its own.


# The code of files that limited their own log, with one time for all kinds.
OWN = re.compile(r"_warned_(s|at)\b|_next_warning|_log_at\b|\b_?(WARN|LOG_EVERY|WARN_EVERY)_S\b")


def test_each_kind_is_logged_at_once_and_then_once_in_a_period() -> None:
    clock = Clock()
    limit = LogLimit(clock=lambda: clock.now_s)
    assert limit.passes("load", "timeout") == 0
    assert limit.passes("load", "timeout") is None
    assert limit.passes("load", "damaged") == 0  # a second kind is not hidden behind the first
    assert limit.passes("save", "timeout") == 0
    clock.now_s += PERIOD_S - 1
    assert limit.passes("load", "timeout") is None
    clock.now_s += 1
    assert limit.passes("load", "timeout") == 2
    assert limit.passes("load", "damaged") == 0
    clock.now_s += PERIOD_S
    assert limit.passes("load", "timeout") == 0


def test_message_kinds_from_outside_take_bounded_memory() -> None:
    clock = Clock()
    limit = LogLimit(clock=lambda: clock.now_s)
    assert limit.passes("mine") == 0
    assert [limit.passes(str(number)) for number in range(10_000)] == [0] * 10_000
    assert len(limit._kinds) <= 256


def test_kind_of_an_error_has_its_errno() -> None:
    assert kind_of(ValueError("a")) == kind_of(ValueError("b")) == "ValueError"
    assert kind_of(OSError(5, "a")) != kind_of(OSError(28, "a"))
    assert (and_more(0), and_more(3)) == ("", " (3 more of this kind since it was last logged)")


def test_only_one_module_limits_log_messages() -> None:
    own = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] == "beluga" and path.name != "limit.py"
        for found in OWN.finditer(path.read_text())
    ]
    assert own == []


# ---- Waiting for threads, with interrupts.


def test_a_thread_whose_join_was_interrupted_is_waited_for() -> None:
    """CPython 3.9 to 3.12 mark such a thread as ended: a second join returns at once."""
    ended = threading.Event()

    def work() -> None:
        for _ in range(2):  # the first one interrupts the join, the second one wait_for
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            thread.join()
        finally:
            wait_for([thread])
    assert ended.is_set()
    assert thread not in threading.enumerate()


def test_threads_that_have_ended_or_never_began_are_not_waited_for() -> None:
    over, never = threading.Thread(target=int), threading.Thread(target=int)
    over.start()
    over.join()
    wait_for([over, never])


# ---- The registry of metrics: series by labels, kinds, quantiles.


def test_series_are_distinguished_by_their_labels() -> None:
    registry = Registry()
    saved = registry.counter("saved_total", "Blocks saved.")
    saved.add(tier="a")
    saved.add(2, tier="b")
    assert registry.counter("saved_total", "") is saved
    assert (saved.value(tier="a"), saved.value(tier="b"), saved.value()) == (1, 2, 0)
    assert registry.snapshot()["saved_total"].series == {
        (("tier", "a"),): 1,
        (("tier", "b"),): 2,
    }


def test_a_name_has_one_kind_and_a_counter_only_grows() -> None:
    registry = Registry()
    counter = registry.counter("one", "")
    with pytest.raises(ValueError, match="one is a counter already"):
        registry.gauge("one", "")
    with pytest.raises(ValueError, match="cannot fall by 1"):
        counter.add(-1)


def test_a_gauge_may_be_a_function_that_is_called_when_it_is_read() -> None:
    registry, values = Registry(), [3.0]
    gauge = registry.gauge("blocks", "")
    gauge.set(lambda: values[0], tier="a")
    values[0] = 5.0
    assert registry.snapshot()["blocks"].series == {(("tier", "a"),): 5.0}
    gauge.remove(tier="a")
    assert registry.snapshot()["blocks"].series == {}


def test_a_value_at_a_bound_belongs_to_that_bound() -> None:
    histogram = Registry().histogram("wait_seconds", "", (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    found = histogram.value()
    assert (found.counts, found.count, found.total) == ((2, 1, 1), 4, pytest.approx(7.65))
    assert [found.quantile(share) for share in (0.5, 0.75, 1.0)] == [0.1, 1.0, float("inf")]
    assert Distribution((0.1,), (0, 0), 0.0).quantile(0.9) == 0.0


def test_threads_lose_no_count() -> None:
    counter = Registry().counter("calls_total", "")

    def count() -> None:
        for _ in range(2000):
            counter.add(kind="x")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value(kind="x") == 8000


def test_the_text_of_prometheus_escapes_labels_and_counts_buckets_up() -> None:
    registry = Registry()
    registry.counter("a_total", 'Of a "path"\\or\nline.').add(3, path='x"\\\n')
    registry.gauge("b", "B.").set(0.25)
    times = registry.histogram("c_seconds", "C.", bounds=(0.5, 1.0))
    for value in (0.1, 0.2, 0.7, 9.0):
        times.observe(value, op="get")
    assert prometheus_text(registry.snapshot()).splitlines() == [
        '# HELP a_total Of a "path"\\\\or\\nline.',
        "# TYPE a_total counter",
        'a_total{path="x\\"\\\\\\n"} 3',
        "# HELP b B.",
        "# TYPE b gauge",
        "b 0.25",
        "# HELP c_seconds C.",
        "# TYPE c_seconds histogram",
        'c_seconds_bucket{op="get",le="0.5"} 2',
        'c_seconds_bucket{op="get",le="1"} 3',
        'c_seconds_bucket{op="get",le="+Inf"} 4',
        'c_seconds_sum{op="get"} 10',
        'c_seconds_count{op="get"} 4',
    ]


def test_nan_and_infinity_are_written_for_prometheus() -> None:
    registry = Registry()
    gauge = registry.gauge("g", "G.")
    for name, value in (("a", math.inf), ("b", -math.inf), ("c", math.nan)):
        gauge.set(value, n=name)
    ends = [line.split()[1] for line in prometheus_text(registry.snapshot()).splitlines()[2:]]
    assert ends == ["+Inf", "-Inf", "NaN"]
