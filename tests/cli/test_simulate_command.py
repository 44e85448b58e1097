# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga simulate``: rows as JSON, tables, reports, and errors in one line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from page.well_formed import Page
from support.emulation import long

from beluga.replay import Conversations, make_workload, write_trace

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(make_workload(Conversations(conversation_count=10, turn_count=3)), path)
    return path


def test_rows_have_both_memories_each_seed_and_the_mean(run: Run, trace: Path) -> None:
    done = run("simulate", trace, "--policy", "least-tokens,linear", "--seeds", 2, "--json")
    rows = json.loads(done.stdout)
    assert [(row["policy"], row["memory"], row["seed"]) for row in rows] == [
        (policy, memory, seed)
        for policy in ("least-tokens", "linear")
        for memory in ("pool", "split")
        for seed in (0, 1, None)
    ]
    for row in rows:
        assert row["requests"] == 30
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"]
        assert 0 < row["hit_rate"] < 1
        assert row["ttft_mean_s"] > 0


@pytest.mark.parametrize("command", ["simulate", long("replay")])
@pytest.mark.parametrize("given", [False, True])
def test_json_has_the_detected_format_that_stderr_shows(
    run: Run, tmp_path: Path, command: str, given: bool
) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": n, "input_length": 32, "output_length": 1, "hash_ids": [n, n + 1]}
        for n in range(4)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--policy", "random", "--memory", "pool"] if command == "simulate" else []
    if given:
        options += ["--format", "mooncake", "--time-unit", "s", "--block-tokens", "16"]
    done = run(command, trace, *options, "--json")
    found = json.loads(done.stdout)
    read = found[0]["read"] if command == "simulate" else found["read"]
    assert {name: read[name] for name in ("file", "format", "time_unit", "block_tokens")} == {
        "file": "t.jsonl", "format": "mooncake", "time_unit": "s" if given else "ms",
        "block_tokens": 16,
    }  # fmt: skip
    for name, option in (("format", "format"), ("time_unit", "time-unit")):
        assert read[f"{name}_guessed"] is not given
        assert (f"(guessed; --{option})" in done.stderr) is not given
    assert read["block_tokens_guessed"] is not given
    assert ("hash_ids" in read["block_tokens_note"]) is not given
    assert (read["skipped"], read["left_out"]) == ([], {})


def test_text_output_is_a_table_bars_and_a_page(run: Run, trace: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "<img src=x>&'.jsonl"
    hostile.write_bytes(trace.read_bytes())
    report = tmp_path / "report.html"
    options = ("--policy", "least-cost,min-ttft", "--speed", "4,8", "--report", report)
    done = run("simulate", hostile, *options, "--plot", "--json")
    assert done.stderr.startswith(f"read {hostile.name}: format mooncake (guessed; --format)")
    assert done.stderr.count("\n") == 1
    read = Page(report.read_text())
    assert hostile.name in read.texts["h1"][0]
    assert any(f"simulate '{hostile.parent}" in text or hostile.name.split("'")[0] in text
               for text in read.texts["dd"])  # fmt: skip
    rows = [row for row in json.loads(done.stdout) if row["seed"] is None]
    assert {row["speed"] for row in rows} == {4, 8}
    shown = " ".join(read.texts["td"])
    for row in rows:
        assert f"{row['ttft_mean_s']:.3g}" in shown
        assert f"{100 * row['hit_rate']:.3g} %" in shown
        assert len(row["course"]["waiting"]) == len(row["course"]["end_s"])
    assert {"Over time", "All figures", "What was simulated"} <= set(read.texts["h2"])
    people = run("simulate", trace, "--policy", "random", "--plot")
    assert "TTFT" in people.stdout and "####" in people.stdout


def test_other_clusters_can_be_described(run: Run, trace: Path) -> None:
    options = ("--workers", 2, "--local", "64GiB", "--bandwidth", 5, "--gpu-path", "switch",
               "--adapters", 1, "--model", "llama-3.1-8b-h200", "--engine", "serial",
               "--eviction", "fifo", "--scale-at", "0:+2", "--policy",
               "min-ttft:ttft_objective_s=60",
               "--format", "mooncake")  # fmt: skip
    done = run("simulate", trace, *options, "--json")
    rows = json.loads(done.stdout)
    assert {row["capacity_bytes"] for row in rows} == {128 << 30}
    assert all(row["hit_rate_after"] is not None for row in rows)


def test_the_preset_is_the_cluster_of_the_reference(run: Run, trace: Path) -> None:
    done = run("simulate", trace, "--preset", "feasibility", "--policy", "random", "--json")
    assert {row["capacity_bytes"] for row in json.loads(done.stdout)} == {1950 << 30}


def test_unequal_memory_sizes_are_reported(run: Run, trace: Path) -> None:
    done = run("simulate", trace, "--policy", "random", "--pool-bytes", "1TiB", "--local", "8GiB")
    assert "not equal: the pool has 1 TiB, all DRAM together 64 GiB" in done.stderr


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--format", "azure"), "no columns TIMESTAMP"),
        (("--policy", "random", "--report", "x.pdf"), "--report 'x.pdf' is not .html"),
    ],
)
def test_invalid_combinations_are_rejected_in_one_line(
    run: Run, trace: Path, options: tuple[str, ...], what: str
) -> None:
    done = run("simulate", trace, *options)
    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if line.startswith("beluga: error: ")]
    assert what in line
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--policy", "x"), "no policy 'x'; choose"),
        (("--model", "x"), "no costs for the model 'x'"),
        (("--format", "x"), "is 'x'; give mooncake"),
        (("--rate", "0"), "--rate"),
    ],
)
def test_an_invalid_option_value_is_a_usage_error(
    run: Run, trace: Path, options: tuple[str, ...], what: str
) -> None:
    done = run("simulate", trace, *options)
    assert done.returncode == 2
    assert what in done.stderr
