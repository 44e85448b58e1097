# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga doctor``: its lines, its JSON and its exit status, on this machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from beluga.doctor import CHECKS

Run = Callable[..., "subprocess.CompletedProcess[str]"]

NAMES = [check.name for check in CHECKS]


@pytest.mark.usefixtures("server")
def test_doctor_prints_one_line_for_each_finding(run: Run, pool: list[str]) -> None:
    done = run("doctor", *pool)
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == NAMES
    assert all(("; fix: " in line) == (": ok: " not in line) for line in lines)
    assert done.returncode == (": error: " in done.stdout)
    assert "pool-server: ok: a server answers, epoch 1" in lines


def test_json_has_one_finding_for_every_check(run: Run, pool: list[str]) -> None:
    found = json.loads(run("doctor", "--json", *pool).stdout)
    assert [each["name"] for each in found] == NAMES
    for each in found:
        assert list(each) == ["name", "level", "text", "fix"]
        assert each["level"] in ("ok", "warning", "error")
        assert isinstance(each["fix"], str)
        assert (each["fix"] == "") == (each["level"] == "ok")
    served = next(each for each in found if each["name"] == "pool-server")
    assert served["fix"].startswith("beluga serve --pool ")


def test_an_error_is_the_exit_status(run: Run, tmp_path: Path) -> None:
    refused = run("doctor", "--pool", tmp_path / "missing", "--json")
    assert refused.returncode == 1
    found = {each["name"]: each for each in json.loads(refused.stdout)}
    assert found["pool-devices"]["level"] == "error"
    assert found["pool-devices"]["fix"] == f"beluga pool create {tmp_path}/missing"


def test_a_server_that_died_is_an_error(
    run: Run, pool: list[str], server: subprocess.Popen[str]
) -> None:
    server.kill()
    server.wait()
    found = {each["name"]: each for each in json.loads(run("doctor", "--json", *pool).stdout)}
    assert found["pool-server"]["level"] == "error"
    assert "does not answer" in found["pool-server"]["text"]
    assert found["pool-server"]["fix"] == "beluga serve " + " ".join(pool)
