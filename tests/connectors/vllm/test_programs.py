# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``scripts/vllm-demo`` as a user runs it, with an empty home directory, ``scripts/vllm-bench``,
and prefill and decode on two engines, with the smallest model: kinds of results, not the speed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from beluga_bench.vllm.arm import MEMORY
from support.leftovers import leftovers

ROOT = Path(__file__).resolve().parents[3]
TOKENS = 641
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the packages may have to be installed
Demo = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    """A function that starts it. Its leftovers are found by its folder for temporary files."""
    children: list[subprocess.Popen[str]] = []
    # the name must be short, because it is part of sockets' names
    temporary = Path(tempfile.mkdtemp(prefix="beluga-test-"))
    environment = os.environ | {"HOME": str(tmp_path / "home"), "TMPDIR": str(temporary)}

    def start(*options: str) -> subprocess.Popen[str]:
        small = ("--model", "tiny", "--tokens", str(TOKENS), "--json")
        command = [ROOT / "scripts/vllm-demo", *small, *options]
        children.append(started(command, env=environment, start_new_session=True))
        return children[-1]

    (tmp_path / "home").mkdir()
    yield start
    for child in children:
        child.kill()
        child.communicate()
    left = list(temporary.iterdir())
    shutil.rmtree(temporary)
    assert left == []


def started(command: list[Any], **options: Any) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)


def result_of(child: subprocess.Popen[str], *, whole: bool = False) -> dict[str, Any]:
    """Return the JSON on the last line of what a program prints, or on all of its lines."""
    try:
        stdout, stderr = child.communicate(timeout=1500)
    finally:
        child.kill()
    if child.returncode == 77:
        pytest.skip(stderr.strip().splitlines()[-1])
    assert child.returncode == 0, stderr[-4000:] + stdout[-4000:]
    result: dict[str, Any] = json.loads(stdout if whole else stdout.splitlines()[-1])
    return result


def in_memory() -> set[Path]:
    """Return the folders of pools that demonstrations have made in memory."""
    return set(MEMORY.glob("beluga-vllm-*"))


def test_a_second_engine_hits_blocks_computed_by_the_first(demo: Demo) -> None:
    before = leftovers("vllm")
    report = result_of(demo("--repetitions", "2"))
    assert leftovers("vllm") <= before
    assert report["prompt_tokens"] == TOKENS
    assert report["hit_tokens"] == 640
    assert report["outputs_identical"] is True
    assert report["repetitions"] == 2
    assert report["load_bytes"] == report["save_bytes"] == 640 * 2 * 4 * 4 * 32 * 2
    times = ("ttft_miss_s", "ttft_local_hit_s", "ttft_hit_s", "ttft_recompute_s")
    work = ("load_s", "load_limit_s", "save_hook_s", "save_cpu_s")
    assert all(report[name] > 0 for name in (*times, *work))
    assert report["peers"] == {}


def test_the_metrics_of_two_servers_show_that_they_share_a_pool(demo: Demo) -> None:
    report = result_of(demo("--serve"))
    assert report["hit_tokens"] == 640
    assert set(report["metrics"].values()) == {640}
    assert set(report["metrics_of_first"].values()) == {0}
    assert report["outputs_identical"] is True


def test_a_request_loads_during_decodes_of_others(demo: Demo) -> None:
    report = result_of(demo("--beside", "--tokens", "4097", "--repetitions", "1"))
    rows = {row["way"]: row for row in report["rows"]}
    assert [rows[way]["cached_tokens"] for way in ("alone", "own", "pool")] == [0, 4096, 4096]
    assert report["hit_bytes"] == 4096 * 2 * 4 * 4 * 32 * 2
    loads = [rows[way]["load_bytes"] for way in ("alone", "own", "pool")]
    assert loads == [0, 0, report["hit_bytes"]]
    assert report["passed"] is True
    for row in rows.values():
        assert 0 < row["gap_p50_s"] <= row["gap_p99_s"] <= row["gap_max_s"]
    p99 = report["gap_p99_rise_s"] + rows["own"]["gap_p99_s"]
    assert p99 == pytest.approx(rows["pool"]["gap_p99_s"])


def test_ctrl_c_leaves_nothing_behind(demo: Demo) -> None:
    old, before = leftovers("vllm"), in_memory()
    child = demo()
    assert child.stderr
    for line in child.stderr:
        if "starting vLLM: beluga" in line:
            break
    else:
        result_of(child)
    time.sleep(3)  # the demo is then in the middle of its work
    assert in_memory() - before
    os.killpg(child.pid, signal.SIGINT)
    child.communicate(timeout=120)
    assert child.returncode == 130
    assert leftovers("vllm") <= old


def test_a_decode_engine_hits_blocks_of_a_prefill_engine(vllm_python: str) -> None:
    small = ("--model", "tiny", "--tokens", "641", "--requests", "2", "--turns", "1")
    disagg = started([vllm_python, "-m", "beluga_bench.vllm.disagg", *small])
    report = result_of(disagg, whole=True)
    alone, pair = report["arms"]
    assert alone["courses"] == {"local": 2}
    assert pair["courses"] == {"remote": 2}
    assert report["decode_hit_part"] > 0.9
    assert min(arm["qps"] for arm in report["arms"]) > 0


def test_each_turn_hits_earlier_turns_on_every_engine(vllm_python: str) -> None:
    small = ("--model", "tiny", "--tokens", "1536", "--conversations", "3", "--turns", "2")
    routed = started([vllm_python, "-m", "beluga_bench.vllm.routed", *small])
    report = result_of(routed, whole=True)
    assert report["found_part"] > 0.9
    assert report["after_found_part"] > 0.9
    assert report["after"]["found_in_pool"] > 0  # the survivor had not computed everything
    assert report["lost"] == {"status": 200, "began": True, "error_event": True, "done": False}


ROOM = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def report(folder: Path) -> dict[str, Any]:
    """One short run with two lengths, one rate and no variant (each takes two more engines)."""
    if shutil.disk_usage(MEMORY).free < ROOM:
        pytest.skip(f"needs {ROOM >> 20} MiB free in {MEMORY}")
    folder.mkdir()
    words = ["--json", "--quick", "--rates", "4", "--variants", "--seed", "5"]
    return result_of(started([ROOT / "scripts/vllm-bench", *words, "--results", folder]))


def test_the_bench_has_hits_and_equal_work_in_every_arm(
    folder: Path, report: dict[str, Any]
) -> None:
    again = [row for row in report["passes"] if row["pass"] == 2 and row["arm"] == "beluga"]
    assert {row["length"] for row in again} == {1025, 2049}
    for row in again:
        assert row["cached_tokens"] == row["full_tokens"] == row["requests"] * (row["length"] - 1)
        assert row["load_bytes"] > 0
    alone = [row for row in report["passes"] if row["arm"] == "plain"]
    assert len(alone) == 4
    for row in alone:  # only blocks that requests share
        assert row["cached_tokens"] == row["repeated_tokens"]
        assert 0.2 < row["repeated_tokens"] / row["full_tokens"] < 0.4
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
    assert json.loads(folder.joinpath("vllm.json").read_text()) == report
    assert all(report[name] for name in ("machine", "commit", "model", "threads"))
    assert report["command"].startswith("scripts/vllm-bench --json --quick")
    assert {path.stem for path in folder.glob("*.png")} == {"vllm-passes", "vllm-rates"}
