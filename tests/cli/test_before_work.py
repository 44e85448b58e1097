# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A command that lacks a package, or cannot write its result, fails before it starts to work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.emulation import long

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]

# No command may start its work, which is replaced by a failure here.
BEGUN = """
import sys
import beluga.cli.simulate, beluga.cli.prefill_worker
def begun(*arguments, **options):
    sys.exit("it has begun")
beluga.cli.simulate.read_named = beluga.cli.simulate.sweep = begun
import beluga_bench
beluga_bench.BENCHES = {"rpc": begun}
beluga.cli.prefill_worker.asyncio.run = begun  # replaces asyncio.run in all modules
sys.modules["uvloop"] = None  # the gateway runs on asyncio without it
"""
SIMULATE = ["simulate", "nothing"]
BENCH = ["bench", "rpc"]
GATEWAY = ["gateway", "--worker", "http://127.0.0.1:1"]
PREFILL = ["prefill-worker", "--engine", "http://127.0.0.1:1", "--queue", "pool", "--name", "a"]


def beluga(*arguments: str, without: str | None = None) -> subprocess.CompletedProcess[str]:
    lacks = f"sys.modules[{without!r}] = None\n" if without else ""
    code = BEGUN + lacks + "from beluga.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        long(GATEWAY, "prometheus_client", "router"),
        ([*GATEWAY, "--kv-events", "http://127.0.0.1:1=tcp://127.0.0.1:2"], "zmq", "router"),
    ],
)
def test_missing_packages_are_reported_before_the_work(
    arguments: list[str], package: str, extra: str
) -> None:
    refused = beluga(*arguments, without=package)
    assert refused.returncode == 1
    assert refused.stderr == (
        f"beluga: error: this command needs {package}; pip install 'beluga-kv[{extra}]'\n"
    )


@pytest.mark.parametrize("arguments", [long(SIMULATE), long(BENCH), GATEWAY, long(PREFILL)])
def test_a_command_starts_if_its_packages_are_installed(arguments: list[str]) -> None:
    assert "it has begun" in beluga(*arguments).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [*SIMULATE, "--report", "/nowhere/report.html"],
            "/nowhere/report.html: No such file or directory",
        ),
        long([*SIMULATE, "--report", "/proc/report.html"], "/proc/report.html"),
        long(
            ["bench", "report", "--out", "/nowhere/page.html"],
            "/nowhere/page.html: No such file or directory",
        ),
        (["get", "key", "/nowhere/block"], "/nowhere/block: No such file or directory"),
    ],
)
def test_the_output_path_is_checked_before_the_work(arguments: list[str], message: str) -> None:
    refused = beluga(*arguments)
    assert refused.returncode == 1
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert "begun" not in refused.stderr


@pytest.mark.parametrize("closed", [long("<&-"), long(">&-"), long("2>&-"), "<&- >&- 2>&-"])
def test_closed_streams_cause_no_failure(pool: list[str], closed: str) -> None:
    """The next file that is opened must not get a stream's number, or it would be written to."""
    code = "from beluga.cli.main import main; main()"
    command = f'exec "$0" -c "$1" pool info --json {" ".join(pool)} {closed}'
    ended = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (
        subprocess.run(
            [sys.executable, "-c", code, "pool", "check", *pool],
            cwd=ROOT,
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )
