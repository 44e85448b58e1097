# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The demo of GPU workers: without a GPU it uses host-compiled kernels, and reports it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from beluga_bench.gpu import demo as gpu_demo
from beluga_bench.gpu.demo import Report, _Counts
from beluga_bench.gpu.demo_worker import Served

from beluga.errors import EngineUnavailableError
from beluga.transfer import CupyDriver

TIMEOUT_S = 300
SMALL = ("--conversations", "6", "--turns", "4")


def has_gpu() -> bool:
    try:
        CupyDriver().close()
    except EngineUnavailableError:
        return False
    return True


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "beluga_bench.gpu.demo", *arguments]
    environment = os.environ | {"COLUMNS": "200"}  # readline, which pytest imports, sets 80
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as child:
        try:
            output = child.communicate(timeout=TIMEOUT_S)
        finally:
            child.kill()
    return subprocess.CompletedProcess([child.pid], child.returncode, *output)


@pytest.mark.usefixtures("compiled")
def test_two_workers_share_stored_blocks() -> None:
    completed = demo(*SMALL, "--json")
    assert completed.returncode == 0, completed.stderr
    report: dict[str, Any] = json.loads(completed.stdout)
    assert report["policy"] == "least-tokens"
    assert sum(report["requests"]) == 24
    assert min(report["requests"]) > 0
    assert report["wrong_blocks"] == 0
    assert 0 < report["crossed"] <= report["blocks_from_pool"] < report["blocks_looked_up"]
    moved = report["blocks_in_engines"] + report["blocks_from_pool"] + report["blocks_stored"]
    assert moved <= report["blocks_looked_up"]
    assert report["blocks_in_engines"] > 0
    assert report["blocks_evicted"] > 0
    assert report["kernel_launches"] > 0
    assert report["bytes_bounced"] == 0  # every window was registered
    assert report["gpu"] == has_gpu()
    if not report["gpu"]:
        assert "NOT a GPU" in report["copied_by"]
        assert "these times do not apply to a GPU" in completed.stderr
    assert leftovers(completed.args[0]) == []


@pytest.mark.long
@pytest.mark.usefixtures("compiled")
def test_the_text_report_names_the_copying_engine() -> None:
    completed = demo("--conversations", "2", "--turns", "3")
    assert completed.returncode == 0, completed.stderr
    assert "ignores caches" in completed.stdout
    assert ("NOT a GPU" in completed.stdout) != has_gpu()


def test_a_demo_that_cannot_run_is_refused() -> None:
    for options, status, why in (
        (("--conversations", "100", "--turns", "3"), 2, "1 to 200 turns"),
        ((*SMALL, "--engine-blocks", "1"), 1, "an engine of 1 blocks is too small"),
    ):
        completed = demo(*options)
        assert completed.returncode == status
        assert why in completed.stderr


def test_blocks_of_the_other_worker_are_counted_separately() -> None:
    counts = _Counts()
    counts.add(0, Served(3, 0, [], 0, [1, 2]))
    counts.add(1, Served(3, 0, [1, 2], 0, [3]))
    counts.add(1, Served(3, 1, [2, 3], 1, []))
    assert (counts.device_hits, counts.onboarded) == (1, 4)
    assert (counts.looked_up, counts.wrong) == (9, 1)
    assert counts.crossed == 3, "blocks 1 and 2, and 2 once more"
    assert counts.requests == [1, 2]


def test_wrong_blocks_fail_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(True, "made up", "", "", [1, 1], 9, 9, 9, 4, 9, 9, 9, 9, 0, 9, 2, 1.0)
    monkeypatch.setattr(gpu_demo, "run", lambda *_: report)
    monkeypatch.setattr(sys, "argv", ["demo-gpu"])
    with pytest.raises(SystemExit, match="2 blocks came with wrong bytes"):
        gpu_demo.main()
    assert "GPU" not in capsys.readouterr().err


def leftovers(pid: int) -> list[Path]:
    roots = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [path for root in roots for path in root.glob(f"beluga-demo-gpu-{pid}-*")]
