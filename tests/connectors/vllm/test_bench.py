# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``scripts/vllm-bench`` as users start it, with a tiny model: the kind of results, not the
speed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from beluga_bench.vllm.arm import MEMORY

ROOM = 1 << 30
SCRIPT = Path(__file__).resolve().parents[3] / "scripts/vllm-bench"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    """One short run with two lengths, one rate and no variant (each takes two more engines)."""
    if shutil.disk_usage(MEMORY).free < ROOM:
        pytest.skip(f"needs {ROOM >> 20} MiB free in {MEMORY}")
    words = ["--json", "--quick", "--rates", "4", "--variants", "--seed", "5"]
    command = [SCRIPT, *words, "--results", folder]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1500)
    if ended.returncode == 77:
        pytest.skip(ended.stderr.strip().splitlines()[-1])
    assert ended.returncode == 0, ended.stderr[-4000:]
    content: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return content


def test_the_second_pass_hits_every_whole_block(report: dict[str, Any]) -> None:
    again = [row for row in report["passes"] if row["pass"] == 2 and row["arm"] == "beluga"]
    assert {row["length"] for row in again} == {1025, 2049}
    for row in again:
        assert row["cached_tokens"] == row["full_tokens"] == row["requests"] * (row["length"] - 1)
        assert row["load_bytes"] > 0


def test_vllm_alone_hits_only_blocks_that_requests_share(report: dict[str, Any]) -> None:
    alone = [row for row in report["passes"] if row["arm"] == "plain"]
    assert len(alone) == 4
    for row in alone:
        assert row["cached_tokens"] == row["repeated_tokens"]
        assert 0.2 < row["repeated_tokens"] / row["full_tokens"] < 0.4


def test_every_arm_does_the_same_work(report: dict[str, Any]) -> None:
    assert report["verdict"] == {
        "full_hits": {"beluga": True},
        "same_work": True,
        "variants_full_hits": True,
        "variants_outputs_identical": True,
        "passed": True,
    }
    assert {row["output_tokens"] / row["requests"] for row in report["passes"]} == {4}
    assert [row["arm"] for row in report["rates"]] == ["plain", "beluga"]
    assert report["variants"] == []


def test_a_result_names_its_source(report: dict[str, Any], folder: Path) -> None:
    written = json.loads(folder.joinpath("vllm.json").read_text())
    assert written == report
    assert all(report[name] for name in ("machine", "commit", "model", "threads"))
    assert report["command"].startswith("scripts/vllm-bench --json --quick")
    assert {path.stem for path in folder.glob("*.png")} == {"vllm-passes", "vllm-rates"}
