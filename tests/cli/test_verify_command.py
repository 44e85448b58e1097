# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands ``doctor``, ``verify`` and ``bench``."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import beluga_bench
import numpy as np
import pytest
from click.testing import CliRunner, Result
from page.well_formed import Page, row

from beluga import IndexServer, KVCache
from beluga.cli import doctor as command
from beluga.cli.app import app
from beluga.doctor.checks import CHECKS
from beluga.errors import BelugaError, VerifyError
from beluga.pool import Pool
from beluga.verify import MachineRecord, VerifyReport, VerifyResult

Run = Callable[..., "subprocess.CompletedProcess[str]"]
NAMES = [check.name for check in CHECKS]


@pytest.mark.usefixtures("server")
def test_doctor_prints_one_line_for_each_finding(run: Run, pool: list[str]) -> None:
    ended = run("doctor", *pool)
    lines = ended.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == NAMES
    assert all(("; fix: " in line) == (": ok: " not in line) for line in lines)
    assert ended.returncode == (": error: " in ended.stdout)
    assert "pool-server: ok: a server answers, epoch 1" in lines


def test_json_has_one_finding_for_every_check(run: Run, pool: list[str]) -> None:
    findings = json.loads(run("doctor", "--json", *pool).stdout)
    assert [each["name"] for each in findings] == NAMES
    for each in findings:
        assert list(each) == ["name", "level", "text", "fix"]
        assert each["level"] in ("ok", "warning", "error")
        assert isinstance(each["fix"], str)
        assert (each["fix"] == "") == (each["level"] == "ok")
    served = next(each for each in findings if each["name"] == "pool-server")
    assert served["fix"].startswith("beluga serve --pool ")


def test_an_error_is_the_exit_status(run: Run, tmp_path: Path) -> None:
    refused = run("doctor", "--pool", tmp_path / "missing", "--json")
    assert refused.returncode == 1
    findings = {each["name"]: each for each in json.loads(refused.stdout)}
    assert findings["pool-devices"]["level"] == "error"
    assert findings["pool-devices"]["fix"] == f"beluga pool create {tmp_path}/missing"


def test_a_server_that_died_is_an_error(
    run: Run, pool: list[str], server: subprocess.Popen[str]
) -> None:
    server.kill()
    server.wait()
    findings = {each["name"]: each for each in json.loads(run("doctor", "--json", *pool).stdout)}
    assert findings["pool-server"]["level"] == "error"
    assert "does not answer" in findings["pool-server"]["text"]
    assert findings["pool-server"]["fix"] == "beluga serve " + " ".join(pool)


Start = Callable[..., "subprocess.Popen[str]"]
QUICK = ("--seconds", 0)  # run every test once
ROWS = 8 * 2 * 2  # tests, initiators, modes


def named(paths: list[str]) -> list[str]:
    return [word for path in paths for word in ("--pool", path)]


@pytest.fixture
def paths(pool: list[str]) -> list[str]:
    """The devices of a fresh pool."""
    return pool[1::2]


def contents(paths: list[str]) -> list[bytes]:
    """Return the content of the devices."""
    return [Path(path).read_bytes() for path in paths]


def counted(report: dict[str, Any]) -> list[tuple[int, int]]:
    """Return trials and violations of each finding."""
    return [(finding["trials"], finding["violations"]) for finding in report["findings"]]


def check_required(report: dict[str, Any]) -> None:
    """Check that each test ran, and that what is required holds. A CPU may reorder or tear plain
    loads and stores."""
    assert all(trials > 0 for trials, _ in counted(report))
    assert not any(finding["violations"] for finding in report["findings"] if finding["promised"])


def test_files_of_one_host_pass_and_are_unchanged(run: Run, paths: list[str]) -> None:
    before = contents(paths)
    ended = run("verify", *named(paths), *QUICK, "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["good"], report["role"]) == (True, "alone")
    assert report["machine"]["kernel"]
    assert [device["path"] for device in report["devices"]] == paths
    assert len(report["findings"]) == ROWS * len(paths)
    check_required(report)
    assert contents(paths) == before


def test_the_text_report_has_a_line_for_each_test_initiator_and_mode(
    run: Run, paths: list[str]
) -> None:
    ended = run("verify", *named(paths), *QUICK)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("holds") + ended.stdout.count("does not hold") == ROWS
    assert ended.stderr == "everything required holds\n"


def test_two_processes_play_two_hosts(start: Start, paths: list[str]) -> None:
    follower = start("verify", *named(paths[::-1]), "--peer", "--role", "b", "--json")
    leader = start("verify", *named(paths), "--peer", "--role", "a", *QUICK, "--json")
    reports = []
    for side in (leader, follower):
        stdout, stderr = side.communicate(timeout=120)
        assert side.returncode == 0, stderr
        reports.append(json.loads(stdout))
    assert [report["role"] for report in reports] == ["a", "b"]
    assert counted(reports[0]) == counted(reports[1])
    check_required(reports[0])


def test_without_a_peer_verify_fails_with_one_line(run: Run, paths: list[str]) -> None:
    before = contents(paths)
    ended = run("verify", *named(paths), "--peer", "--role", "a", "--timeout", 0.5)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[1].startswith("beluga: error: side b did not come within 0.5")
    assert contents(paths) == before


def test_ctrl_c_ends_it_and_leaves_nothing_behind(start: Start, paths: list[str]) -> None:
    before = contents(paths)
    waiting = start("verify", *named(paths), "--peer", "--role", "b")
    assert waiting.stderr
    assert waiting.stderr.readline() == "side b: waiting for side a\n"
    waiting.send_signal(signal.SIGINT)
    waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert contents(paths) == before


@pytest.mark.usefixtures("server")
def test_served_pool_is_refused(run: Run, paths: list[str]) -> None:
    refused = run("verify", *named(paths), *QUICK)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "a server of the pool is running" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_pool_whose_server_has_stopped_can_be_verified(
    run: Run, server: subprocess.Popen[str], paths: list[str]
) -> None:
    server.terminate()
    server.communicate(timeout=60)
    assert run("verify", *named(paths), *QUICK).returncode == 0
    pool = named(paths)
    assert run("pool", "check", *pool).returncode == 0


def test_blocks_in_an_idle_pool_are_not_changed(run: Run, paths: list[str]) -> None:
    pool = named(paths)
    fill(paths, 5)
    assert run("verify", *named(paths), *QUICK).returncode == 0
    assert run("pool", "check", "--payload", *pool).returncode == 0
    fill(paths, 42)
    full = run("verify", *named(paths), *QUICK)
    assert (full.returncode, full.stdout) == (1, "")
    assert "no free stripe" in full.stderr
    assert run("pool", "check", "--payload", *pool).returncode == 0


def fill(paths: list[str], count: int) -> None:
    """Put that many MiB into the pool, two blocks per stripe, and stop its server."""
    payload = np.arange((1 << 20) - 4096, dtype=np.uint8).reshape(1, -1)
    with (
        Pool.open(paths) as pool,
        IndexServer(pool),
        KVCache(pool, namespace="test") as cache,
    ):
        for i in range(count):
            assert cache.put([(count << 8 | i).to_bytes(16, "little")], payload).stored == 1


def finding(pool: Pool, test: int, mode: int, coherence: str) -> VerifyResult:
    """Make a finding with a violation on a device of that coherence."""
    device = replace(pool.devices[0], coherence=coherence)
    return VerifyResult.of(test, mode, 0, device, trials=1, violations=1, rejected=0)


def test_only_guaranteed_properties_can_be_broken(paths: list[str]) -> None:
    with Pool.open(paths) as pool:
        for test in range(8):
            assert finding(pool, test, 0, "hardware").broken
            assert finding(pool, test, 0, "software").broken
            assert not finding(pool, test, 1, "software").broken
        assert finding(pool, 0, 1, "hardware").broken, "message passing"
        assert not finding(pool, 5, 1, "hardware").broken, "a 64-byte store may tear anywhere"


def test_a_broken_guarantee_is_reported_by_its_name(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Pool.open(paths) as pool:
        report = VerifyReport(
            pool=pool.id,
            machine=MachineRecord.here(),
            role="alone",
            started_s=0,
            seconds=0,
            devices=pool.devices,
            findings=(finding(pool, 0, 0, "software"), finding(pool, 1, 1, "software")),
        )
    monkeypatch.setattr("beluga.verify.verify_pool", lambda *_, **__: report)
    with pytest.raises(
        VerifyError, match=r"required but does not hold: message passing a->b \(software\)$"
    ):
        command.verify(paths)
    shown = capsys.readouterr().out
    assert "BROKEN on device 0" in shown
    words = " ".join(shown.replace("│", " ").split())  # a narrow table folds its texts
    assert "does not hold on device 0" in words, shown


PROMISED = {
    *("bench", "case", "bytes", "depth", "threads", "memory", "coherence", "p50_ns", "p99_ns"),
    *("ops_per_s", "gb_per_s", "limit", "ratio_to_limit"),
}


def test_rows_have_the_documented_fields(run: Run) -> None:
    ended = run("bench", "coherence", "--smoke", "--json", "--coherence", "hardware")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    assert {row["case"] for row in rows} >= {"streamed store", "read after flush"}
    assert all(row.keys() >= PROMISED for row in rows)
    assert all(row["coherence"] == "hardware" and row["memory"] for row in rows)


@pytest.mark.long
def test_calls_are_measured_or_the_row_reports_too_few_cores(run: Run) -> None:
    ended = run("bench", "rpc", "--smoke", "--json", "--coherence", "hardware")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    assert all(row.keys() >= PROMISED for row in rows)
    if len(os.sched_getaffinity(0)) > 1:
        assert {row["case"] for row in rows} == {"c", "python"}
        assert all(row["coherence"] == "hardware" and row["memory"] for row in rows)
    else:
        assert [(row["case"], row["note"]) for row in rows] == [("c", "skipped: needs two cores")]


Benches = dict[str, Callable[[Any], Any]]


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Benches:
    """Replace the benchmarks by one that has a row. The current folder is an empty one."""
    monkeypatch.chdir(tmp_path)
    made: Benches = {"rpc": lambda options: [row()]}
    monkeypatch.setattr(beluga_bench, "BENCHES", made)
    return made


def beluga(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "report", *map(str, arguments)])


def ends_with(error: BaseException) -> Callable[[Any], Any]:
    def run(options: Any) -> Any:
        raise error

    return run


def test_the_page_has_the_rows_that_json_has(benches: Benches, tmp_path: Path) -> None:
    ended = beluga("--json", "--out", "page.html")
    assert (ended.exit_code, ended.stderr) == (0, "wrote page.html\n")
    assert json.loads(ended.stdout) == [row()]
    read = Page((tmp_path / "page.html").read_text())
    assert "950 ns" in read.texts["td"]
    assert {"CPU", "Kernel", "Memory", "Commit", "Command"} <= set(read.texts["dt"])


def test_without_a_name_the_page_is_written_to_the_current_folder(benches: Benches) -> None:
    assert beluga("rpc", "--smoke").exit_code == 0
    assert Path("beluga-bench.html").is_file()


def test_a_failed_benchmark_does_not_stop_the_others(benches: Benches) -> None:
    benches["a"] = ends_with(BelugaError("no fio"))
    benches["b"] = lambda options: [row("b")]
    ended = beluga()
    assert isinstance(ended.exception, BelugaError)
    assert str(ended.exception) == "a failed; the page has the others"
    read = Page(Path("beluga-bench.html").read_text())
    assert "a is missing: it failed: no fio" in read.texts["p"]
    assert {"bench-rpc", "bench-b"} <= set(read.ids)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interruption_leaves_a_page_of_completed_rows(
    benches: Benches, error: BaseException
) -> None:
    benches["a"] = ends_with(error)
    benches["b"] = lambda options: pytest.fail("it went on")
    ended = beluga()
    assert ended.exit_code in (130, 143)
    assert ended.stderr.splitlines()[-2:] == ["wrote beluga-bench.html", "interrupted"]
    read = Page(Path("beluga-bench.html").read_text())
    assert "bench-rpc" in read.ids
    for name in ("a", "b"):
        assert f"{name} is missing: the run was interrupted" in read.texts["p"]


def test_an_interruption_of_the_first_benchmark_leaves_no_file(
    benches: Benches, tmp_path: Path
) -> None:
    benches["rpc"] = ends_with(KeyboardInterrupt())
    ended = beluga()
    assert ended.exit_code == 130
    assert ended.stderr.splitlines() == ["interrupted before any benchmark was complete: no page"]
    assert list(tmp_path.iterdir()) == []


def test_a_page_of_files_runs_nothing(benches: Benches, tmp_path: Path) -> None:
    benches["rpc"] = lambda options: pytest.fail("it ran")
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps([row(case=name)]))
    ended = beluga("--from", "one.json", "two.json", "--out", "page.html")  # as a shell expands *
    assert ended.exit_code == 0, ended.output
    read = Page(Path("page.html").read_text())
    assert {"one", "two"} <= set(read.texts["td"])
    assert "recorded in one.json, two.json; nothing was run" in read.texts["dd"]
