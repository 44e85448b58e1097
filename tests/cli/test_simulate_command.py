# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands ``simulate`` and ``size``, and the trace that commands use if none is named."""

import dataclasses
import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from page.well_formed import Page
from support.emulation import long

from beluga.cli.app import app
from beluga.replay import Conversations, default_requests, make_workload
from beluga.replay.trace import write_trace
from beluga.router import POLICIES, Goals, costs
from beluga.simulate import MEMORIES, PRESETS, Options, Row, Scale, found_shares, load_trace

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(make_workload(Conversations(conversation_count=10, turn_count=3)), path)
    return path


def test_rows_have_both_memories_each_seed_and_the_mean(run: Run, trace: Path) -> None:
    ended = run("simulate", trace, "--policy", "least-tokens,linear", "--seeds", 2, "--json")
    rows = json.loads(ended.stdout)
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
    ended = run(command, trace, *options, "--json")
    shown = json.loads(ended.stdout)
    read = shown[0]["read"] if command == "simulate" else shown["read"]
    assert {name: read[name] for name in ("file", "format", "time_unit", "block_tokens")} == {
        "file": "t.jsonl", "format": "mooncake", "time_unit": "s" if given else "ms",
        "block_tokens": 16,
    }  # fmt: skip
    for name, option in (("format", "format"), ("time_unit", "time-unit")):
        assert read[f"{name}_guessed"] is not given
        assert (f"(guessed; --{option})" in ended.stderr) is not given
    assert read["block_tokens_guessed"] is not given
    assert ("hash_ids" in read["block_tokens_note"]) is not given
    assert (read["skipped"], read["left_out"]) == ([], {})


def test_the_output_is_rows_and_a_page(run: Run, trace: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "<img src=x>&'.jsonl"
    hostile.write_bytes(trace.read_bytes())
    report = tmp_path / "report.html"
    options = ("--policy", "least-cost,min-ttft", "--speed", "4,8", "--report", report)
    ended = run("simulate", hostile, *options, "--json")
    assert ended.stderr.startswith(f"read {hostile.name}: format mooncake (guessed; --format)")
    assert ended.stderr.count("\n") == 1
    read = Page(report.read_text())
    assert hostile.name in read.texts["h1"][0]
    assert any(f"simulate '{hostile.parent}" in text or hostile.name.split("'")[0] in text
               for text in read.texts["dd"])  # fmt: skip
    rows = [row for row in json.loads(ended.stdout) if row["seed"] is None]
    assert {row["speed"] for row in rows} == {4, 8}
    shown = " ".join(read.texts["td"])
    for row in rows:
        assert f"{row['ttft_mean_s']:.3g}" in shown
        assert f"{100 * row['hit_rate']:.3g} %" in shown
        assert len(row["course"]["waiting"]) == len(row["course"]["end_s"])
    assert {"Over time", "All figures", "What was simulated"} <= set(read.texts["h2"])


def test_other_clusters_can_be_described(run: Run, trace: Path) -> None:
    options = ("--workers", 2, "--local", "64GiB", "--bandwidth", 5, "--gpu-path", "switch",
               "--adapters", 1, "--model", "llama-3.1-8b-h200", "--engine", "serial",
               "--eviction", "fifo", "--scale-at", "0:+2", "--policy",
               "min-ttft:ttft_objective_s=60",
               "--format", "mooncake")  # fmt: skip
    ended = run("simulate", trace, *options, "--json")
    rows = json.loads(ended.stdout)
    assert {row["capacity_bytes"] for row in rows} == {128 << 30}
    assert all(row["hit_rate_after"] is not None for row in rows)


def test_the_preset_is_the_cluster_of_the_reference(run: Run, trace: Path) -> None:
    ended = run("simulate", trace, "--preset", "feasibility", "--policy", "random", "--json")
    assert {row["capacity_bytes"] for row in json.loads(ended.stdout)} == {1950 << 30}


def test_unequal_memory_sizes_are_reported(run: Run, trace: Path) -> None:
    ended = run("simulate", trace, "--policy", "random", "--pool-bytes", "1TiB", "--local", "8GiB")
    assert "not equal: the pool has 1 TiB, all DRAM together 64 GiB" in ended.stderr


def row(policy: str, ttft_s: float | None, *, seed: int | None = None, memory: str = "pool") -> Row:
    fields: dict[str, Any] = {field.name: 0.0 for field in dataclasses.fields(Row)}
    fields |= {"policy": policy, "memory": memory, "seed": seed, "spread": None}
    fields |= {"course": None, "speed": 1.0}
    return Row(**fields | {"ttft_mean_s": ttft_s, "hit_rate_before": 0.75, "worker_hours": 1.25})


class Simulation:
    """Records its calls and returns these rows."""

    def __init__(self) -> None:
        self.rows = [row("random", 1.0, seed=0), row("random", 2.0)]
        self.loaded: tuple[Any, ...] = ()
        self.options = Options()
        self.requested: dict[str, Any] = {}

    def load(self, path: Path, form: str | None, **reading: Any) -> Any:
        self.loaded = (path, form, *reading.values())
        return SimpleTrace()

    def run(
        self, trace: Any, cases: list[Options], *, processes: int, advance: Any, **requested: Any
    ) -> list[Row]:
        self.options, self.requested, self.processes = cases[0], requested, processes
        self.speeds = [case.speed for case in cases]
        advance(1, 2)
        return [dataclasses.replace(row, speed=case.speed) for case in cases for row in self.rows]


class SimpleReading:
    def __str__(self) -> str:
        return "a-trace: format mooncake"

    def facts(self) -> dict[str, object]:
        return {"format": "mooncake"}


class SimpleTrace(list[None]):
    """A trace of seven requests."""

    name = "a-trace"
    duration_s = 14.0
    reading = SimpleReading()

    def __init__(self) -> None:
        super().__init__([None] * 7)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    double = Simulation()
    monkeypatch.setattr("beluga.simulate.load_trace", double.load)
    monkeypatch.setattr("beluga.simulate.simulate", double.run)
    return double


def beluga(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_missing_options_get_the_clusters_defaults(simulation: Simulation) -> None:
    assert beluga("t.jsonl").exit_code == 0
    assert simulation.loaded == (Path("t.jsonl"), None, 1.0, None, None)
    assert simulation.options == Options()
    assert simulation.requested == {"policies": list(POLICIES), "memories": MEMORIES, "seeds": 1,
                                "courses": False}  # fmt: skip


POLICY_LIST = "random, linear:decay=2,shared_credit=0.25"


def test_given_options_are_simulated(simulation: Simulation) -> None:
    ended = beluga(
        "t", "--policy", POLICY_LIST, "--workers", 3, "--pool-bytes", "2TB",
        "--local", "1.5 gb",
        "--hbm", "64MiB", "--memory", "split", "--bandwidth", 5, "--local-bandwidth", 6,
        "--gpu-path", "switch", "--adapters", 2, "--devices", 9, "--speed", 4, "--model",
        "llama-3.1-8b-h200", "--engine", "serial", "--eviction", "fifo", "--seeds", 2,
        "--scale-at", "7.5:-2", "--ttft-goal", 8, "--format", "vllm",
        "--rate", 10, "--time-unit", "s", "--block-tokens", 64,
    )  # fmt: skip
    assert ended.exit_code == 0
    assert simulation.loaded == (Path("t"), "vllm", 10.0, "s", 64)
    assert simulation.requested == {
        "policies": ["random", "linear:decay=2,shared_credit=0.25"], "memories": ("split",),
        "seeds": 2, "courses": False,
    }  # fmt: skip
    assert simulation.options == Options(
        workers=3, pool=2 * 10**12, local=1_500_000_000, hbm=64 << 20, bandwidth=5e9,
        local_bandwidth=6e9, gpu_path="switch", adapters=2, devices=9, speed=4.0,
        model=costs.MODELS["llama-3.1-8b-h200"], engine="serial", eviction="fifo",
        scale=Scale(7.5, -2), ttft_goal_s=8.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [("3KB", 3000), ("2mb", 2_000_000), ("1GB", 10**9), ("2TiB", 2 << 40), ("4096", 4096)],
)
def test_device_capacities_are_decimal(simulation: Simulation, text: str, size: int) -> None:
    beluga("t", "--pool-bytes", text)
    assert simulation.options.pool == size


def test_each_speed_is_run_once(simulation: Simulation) -> None:
    shown = beluga("t", "--speed", "1,2.5,1")
    assert simulation.speeds == [1.0, 2.5]
    assert "at 1x, 2.5x" in shown.stdout and "speed" in shown.stdout


def test_a_preset_overrides_the_rest(simulation: Simulation) -> None:
    beluga("t", "--preset", "feasibility", "--workers", 3, "--speed", 2)
    assert simulation.options == PRESETS["feasibility"](Options(speed=2.0))


def test_the_planner_grows_up_to_its_workers_and_keeps_the_objective(
    simulation: Simulation,
) -> None:
    shown = beluga("t", "--planner", 5, "--ttft-goal", 3)
    assert simulation.options.goals == Goals(ttft_s=3.0, workers_max=5)
    assert "worker hours" in shown.stdout and "1.25" in shown.stdout
    assert "hits before" not in shown.stdout


def test_before_and_after_are_shown_if_workers_are_added(simulation: Simulation) -> None:
    shown = beluga("t", "--scale-at", "0:+1")
    assert simulation.options.scale == Scale(0.0, 1)
    assert "hits before" in shown.stdout and "0.75" in shown.stdout
    assert "worker hours" not in shown.stdout


def test_simulate_prints_means_over_seeds(simulation: Simulation) -> None:
    shown = beluga("t", "--speed", 2)
    assert "a-trace: 7 requests at 2x, 1 seed" in shown.stdout
    assert shown.stdout.count("random") == 1
    assert "simulating" in shown.stderr


def test_json_has_every_row_and_the_assumptions(simulation: Simulation) -> None:
    shown = beluga("t", "--json")
    assert [row["seed"] for row in json.loads(shown.stdout)] == [0, None]
    assert shown.stderr == "read a-trace: format mooncake\n"


@pytest.mark.parametrize(("local", "warned"), [("99GiB", False), ("101GiB", False), ("98GiB", True),
                                               ("102GiB", True)])  # fmt: skip
def test_memories_may_differ_by_a_hundredth(
    simulation: Simulation, local: str, warned: bool
) -> None:
    shown = beluga("t", "--workers", 1, "--pool-bytes", "100GiB", "--local", local)
    assert ("not equal: the pool has 100 GiB" in shown.stderr) is warned


def test_policies_are_listed_with_their_settings(simulation: Simulation) -> None:
    listed = beluga("--policy", "list").stdout
    assert listed == CliRunner().invoke(app, ["gateway", "--policy", "list"]).stdout
    assert [line for line in listed.splitlines() if line[:1] != " "] == list(POLICIES)
    assert "  shared_credit=0.5 (0 to 1): The weight of a block in the pool.\n" in listed
    assert simulation.requested == {}


def test_a_report_has_all_rows(
    simulation: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(
        "beluga.simulate.make_report", lambda *what: written.append(what) or b"page"
    )
    beluga("t", "--report", tmp_path / "r.html")
    [(trace, options, rows, origin)] = written
    assert (tmp_path / "r.html").read_bytes() == b"page"
    assert simulation.requested["courses"] is True
    assert origin.keys() == {"Command", "Version", "Machine", "Date"}
    assert (trace.name, options) == ("a-trace", Options())
    assert rows == simulation.rows


def test_saturation_is_reported(simulation: Simulation) -> None:
    assert "saturated" not in beluga("t").stderr
    late = dataclasses.replace(row("random", 90.0), ttft_p99_s=150.0, throughput_per_s=0.25)
    simulation.rows = [late, row("linear", 1.0)]
    output = " ".join(beluga("t").stderr.split())
    assert (
        "saturated: in 1 of 2 runs requests queue for minutes, up to 2.5 (p99 of random" in output
    )
    assert "0.5 requests arrive in a second, and 0.25 are served" in output


def test_the_readers_assumptions_are_printed(simulation: Simulation) -> None:
    for more in ((), ("--json",)):
        shown = beluga("t", *more)
        assert "read a-trace: format mooncake" in shown.stderr
        assert "format mooncake" not in shown.stdout


def test_the_default_trace_is_always_the_same() -> None:
    """The documentation has figures of it."""
    text = b"".join(msgspec.json.encode(request) for request in default_requests())
    assert hashlib.sha256(text).hexdigest().startswith("1f5cf5abba43b2726b588d6730d00ea1")
    reading = load_trace(None).reading
    assert reading is not None
    assert (reading.form, reading.time_unit, reading.block_tokens) == ("mooncake", "ms", 512)


@pytest.mark.parametrize(
    ("command", "requests"),
    [
        (("simulate", "--policy", "least-tokens", "--memory", "pool"), 1200),
        long(("replay", "--block-bytes", "4K"), 1200),
        (("size",), 1200),
    ],
)
def test_commands_use_the_trace_and_report_it(
    run: Run, command: tuple[str, ...], requests: int
) -> None:
    ended = run(*command, "--json")
    assert ended.returncode == 0, ended.stderr
    assert "no trace is given; using 1,200 requests of synthetic conversations" in ended.stderr
    result = json.loads(ended.stdout)
    row = result[0] if isinstance(result, list) else result.get("trace", result)
    assert row["requests"] == requests


def test_size_needs_no_argument_and_shows_the_ideal_hit_rate(run: Run) -> None:
    result = json.loads(run("size", "--json").stdout)
    assert result["bytes_per_token"] == 256 << 10  # Qwen3-32B
    (pool,) = result["tiers"]
    assert pool["found"] == pytest.approx(result["trace"]["ideal_hit_rate"])
    assert pool["size_bytes"] >= result["trace"]["bytes"]


def test_size_prints_cumulative_hit_rates_of_tiers(run: Run) -> None:
    result = json.loads(run("size", "--json", "--memory", "100G", "--disk", "200G").stdout)
    memory, disk = (tier["found"] for tier in result["tiers"])
    assert 0.3 < memory < disk < result["trace"]["ideal_hit_rate"]


def test_a_cache_finds_the_leading_blocks_that_it_holds(tmp_path: Path) -> None:
    lines = [[1, 2], [3, 4], [1, 2], [5, 2]]
    text = "".join(
        json.dumps({"timestamp": at, "input_length": 32, "output_length": 1, "hash_ids": ids})
        + "\n"
        for at, ids in enumerate(lines)
    )
    (tmp_path / "trace").write_text(text)
    trace = load_trace(tmp_path / "trace", block_tokens=16)
    # With room for 4 blocks, [1, 2] is a hit; with room for 2, [3, 4] has evicted it. 2 after 5 is
    # not a prefix.
    assert found_shares(trace, [2, 4]) == [0, 2 / 8]


def test_size_takes_a_trace_without_blocks(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,100,10\n")
    result = json.loads(run("size", "--json", "--trace", path).stdout)
    assert [tier["found"] for tier in result["tiers"]] == [0]
