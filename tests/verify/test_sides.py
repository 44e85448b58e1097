# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The sides of an acceptance test: their arguments, how they end, and what they report."""

import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from beluga._ffi import lib
from beluga.errors import BelugaError, VerifyError
from beluga.pool import Pool
from beluga.verify import MachineRecord, VerifyReport, VerifyResult, verify_pool


@pytest.fixture
def pool(paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(paths, device_size=16 << 20, sparse=True, max_blocks=64) as pool:
        yield pool


class FakeSides:
    """The C core, except that the test controls a side: ``runs`` by role; otherwise it succeeds at
    once.
    """

    def __init__(self) -> None:
        self.configs: list[tuple[int, int, int]] = []  # role, duration and patience in ns
        self.masks: set[tuple[int, int]] = set()  # of tests, of modes
        self.runs: dict[int, Any] = {}
        self.created = 0
        self.log: list[str] = []
        self.stopped = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def bl_acceptance_create(self, pool: Any, config: Any, out: Any) -> int:
        self.configs.append((config.role, config.duration_ns, config.patience_ns))
        self.masks.add((config.tests, config.modes))
        return self.created or int(lib.bl_acceptance_create(pool, config, out))

    def bl_acceptance_run(self, side: Any) -> int:
        assert threading.current_thread().daemon  # the thread must not keep the process from ending
        role = self.log.count("run")
        self.log.append("run")
        code = self.runs[role]() if role in self.runs else 0
        self.log.append("ran")
        return int(code)

    def bl_acceptance_stop(self, side: Any) -> None:
        self.log.append("stop")
        self.stopped.set()

    def bl_acceptance_destroy(self, side: Any) -> None:
        self.log.append("destroy")
        lib.bl_acceptance_destroy(side)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> FakeSides:
    fake = FakeSides()
    monkeypatch.setattr("beluga.verify.run.lib", fake)
    return fake


def test_both_local_sides_run_every_test_on_every_device(pool: Pool) -> None:
    before, start = time.time(), time.monotonic()
    report = verify_pool(pool, seconds=0)
    assert before <= report.started_s <= time.time()
    assert 0 < report.seconds <= time.monotonic() - start
    assert (report.role, report.pool, report.devices) == ("alone", pool.id, pool.devices)
    assert report.machine == MachineRecord.here()
    tried = {(f.test, f.initiator, f.mode, f.device) for f in report.findings if f.trials}
    assert len(tried) == len(report.findings) == 8 * 2 * 2 * 2
    assert report.good
    assert report.broken() == []


def test_two_processes_are_one_side_each(pool: Pool) -> None:
    reports: list[VerifyReport] = []

    def follow() -> None:
        reports.append(verify_pool(pool, role="b"))

    thread = threading.Thread(target=follow)
    thread.start()
    leader = verify_pool(pool, role="a", seconds=0.3)
    thread.join()
    assert (leader.role, reports[0].role) == ("a", "b")
    assert leader.findings == reports[0].findings
    assert leader.seconds >= 0.3  # the leader's timeout applies, not the follower's 3 s


def test_timeouts_of_sides_are_in_nanoseconds(pool: Pool, sides: FakeSides) -> None:
    verify_pool(pool, seconds=0.5, patience=0.25)
    assert sides.configs == [(0, 500_000_000, 250_000_000), (1, 500_000_000, 250_000_000)]
    assert sides.masks == {(0xFF, 3)}  # eight tests, two modes


def test_by_default_sides_run_for_3_s_and_wait_for_60(pool: Pool, sides: FakeSides) -> None:
    verify_pool(pool, role="b")
    assert sides.configs == [(1, 3_000_000_000, 60_000_000_000)]


@pytest.mark.parametrize(("role", "other"), ["ab", "ba"])
def test_a_side_without_a_peer_names_it(pool: Pool, role: str, other: str) -> None:
    with pytest.raises(VerifyError, match=f"^side {other} did not come .* --role {other}' on"):
        verify_pool(pool, role=role, seconds=0, patience=0.05)


def test_a_side_that_runs_in_another_process_is_not_run_twice(pool: Pool) -> None:
    with (pool.runtime_dir / "verify-b").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(VerifyError, match="side b of a test runs on this host already"):
            verify_pool(pool, seconds=0, patience=0.05)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "no free stripe"),
        (errno.EBUSY, "a server of the pool is running"),
        (errno.EINVAL, "verifying a pool"),
    ],
)
def test_a_side_that_cannot_be_created_reports_the_reason(
    pool: Pool, sides: FakeSides, code: int, message: str
) -> None:
    sides.created = -code
    with pytest.raises((BelugaError, OSError), match=message):
        verify_pool(pool)
    assert sides.log == []


@pytest.mark.parametrize("code", [errno.EPIPE, errno.EIO])
def test_a_side_that_fails_stops_the_other_and_is_reported(
    pool: Pool, sides: FakeSides, code: int
) -> None:
    sides.runs = {0: lambda: -code, 1: lambda: 0 if sides.stopped.wait(60) else 1}
    start = time.monotonic()
    with pytest.raises((BelugaError, OSError)):
        verify_pool(pool)
    assert time.monotonic() - start < 30


def test_sides_that_end_well_do_not_stop_each_other(pool: Pool, sides: FakeSides) -> None:
    verify_pool(pool)
    assert sides.log[-4:] == ["stop", "stop", "destroy", "destroy"]
    assert sides.log.count("stop") == 2  # one report of each, when both have ended


def test_no_side_runs_if_not_all_could_be_started(
    pool: Pool, sides: FakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    class Interrupted(threading.Thread):
        def start(self) -> None:
            threads.append(self)
            super().start()
            if len(threads) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr("beluga.verify.run.Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        verify_pool(pool)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert "run" not in sides.log


@pytest.mark.parametrize("role", ["a", None])
def test_an_interrupt_stops_the_sides_and_frees_them_when_they_have_ended(
    pool: Pool, sides: FakeSides, role: str | None
) -> None:
    """A real one: CPython up to 3.12 marks a thread as ended if its join is interrupted."""

    def run() -> int:
        assert sides.stopped.wait(30)
        time.sleep(0.2)  # the peer polls at intervals
        return -errno.ECANCELED

    def interrupted() -> int:
        time.sleep(0.2)  # the main thread waits for the sides by now
        os.kill(os.getpid(), signal.SIGINT)
        return run()

    sides.runs = {0: interrupted, 1: run}
    with pytest.raises(KeyboardInterrupt):
        verify_pool(pool, role=role)
    count = 1 if role else 2
    assert sides.log.count("ran") == count
    assert sides.log[-count:] == ["destroy"] * count


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("flags\t: sse2\nmodel name\t: Fast: 3 GHz\nmodel name\t: Other\n", "Fast: 3 GHz"),
        ("flags\t: sse2\n", "riscv"),
        (None, "riscv"),
    ],
)
def test_the_cpu_is_named_as_the_kernel_does_or_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, name: str
) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("beluga.verify.run.Path", lambda _: file)
    monkeypatch.setattr("beluga.verify.run.platform.machine", lambda: "riscv")
    assert MachineRecord.here().cpu == name


def test_one_violation_of_a_guarantee_breaks_a_report(pool: Pool) -> None:
    report = verify_pool(pool, seconds=0)
    first = next(f for f in report.findings if f.mode == "software")
    bare = VerifyResult.of(
        lib.BL_ACCEPTANCE_TEARING_16,
        lib.BL_ACCEPTANCE_BARE,
        1,
        pool.devices[0],
        trials=1,
        violations=1,
        rejected=0,
    )
    assert replace(report, findings=(bare,)).good
    broken = replace(report, findings=(bare, replace(first, violations=1), first))
    assert not broken.good
    assert broken.broken() == [f"{first.test} {first.initiator} (software)"]
