# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What works without vLLM of its benchmarks: requests, children, measurements, charts."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from beluga_bench.vllm.arm import Arm, Setting
from beluga_bench.vllm.charts import draw
from beluga_bench.vllm.dataset import Dataset, cut, datasets_of, pool_tokens, warm_up_of
from beluga_bench.vllm.likeness import agreed, faults, identical, loaded_tokens, warnings
from beluga_bench.vllm.limit import limit_loop
from beluga_bench.vllm.measure import Pair, Sample, medians, quartiles, run
from beluga_bench.vllm.model import SIZES, VOCABULARY
from beluga_bench.vllm.process import Child, ChildError, environment_of, options_of
from beluga_bench.vllm.prompts import prompt, prompts
from beluga_bench.vllm.report import print_table, report_of
from beluga_bench.vllm.stream import stream
from beluga_bench.vllm.summary import arrivals, summary
from beluga_bench.vllm.tables import print_tables
from beluga_bench.vllm.tiers import medians_of, ratios, whole
from beluga_bench.vllm.verdict import verdict

BLOCK = 128


def blocks(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Return each whole block of each prompt with its prefix, which together identify a block."""
    return [tuple(tokens[:end]) for tokens in prompts for end in range(BLOCK, len(tokens), BLOCK)]


def test_three_in_ten_blocks_repeat_an_earlier_one_of_the_same_set_only() -> None:
    short, *_, long = datasets = datasets_of([8192, 4096, 2048, 1024], BLOCK, seed=3)
    assert [dataset.length for dataset in datasets] == [1025, 2049, 4097, 8193]
    for dataset in datasets:
        block_tokens = blocks(dataset.prompts)
        fresh = len(set(block_tokens))
        assert len(block_tokens) * BLOCK == dataset.full_tokens
        assert fresh * BLOCK == dataset.fresh_tokens
        assert 0.2 < 1 - fresh / len(block_tokens) < 0.4
        assert all(len(tokens) == dataset.length for tokens in dataset.prompts)
    assert not set(blocks(short.prompts)) & set(blocks(long.prompts))
    assert pool_tokens([short, long]) > short.fresh_tokens + long.fresh_tokens
    warm_up = warm_up_of([short, long])  # it exceeds the engine's cache
    assert sum(map(len, warm_up.prompts)) > 2.5 * (8193 + 3 * BLOCK)
    assert not set(blocks(warm_up.prompts)) & set(blocks(short.prompts))
    assert Dataset(1025, 2, 1, BLOCK, 1).repeated_tokens == 0  # one question


def test_a_set_repeats_by_its_seed_and_in_any_order() -> None:
    first, other = (Dataset(1025, 2, 3, BLOCK, seed) for seed in (1, 2))
    assert first.prompts == Dataset(1025, 2, 3, BLOCK, 1).prompts
    assert not set(blocks(first.prompts)) & set(blocks(other.prompts))
    assert sorted(first.shuffled(5)) == sorted(first.prompts)


@pytest.mark.parametrize("block", [32, 128, 256])
def test_a_cut_prompt_has_one_token_beyond_blocks_of_any_size(block: int) -> None:
    assert {cut(length) % block for length in (512, 2000, 15360)} == {1}


def test_arrivals_have_the_requested_rate_and_vary() -> None:
    times = arrivals(2000, 4.0, seed=1)
    gaps = [late - early for early, late in pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    assert 0.2 < sum(gaps) / len(gaps) < 0.3
    assert max(gaps) > 4 * sum(gaps) / len(gaps)


class Machine:
    """An engine that serves the oldest request first, one token per step."""

    def __init__(self) -> None:
        self.added: list[tuple[str, list[int], list[int]]] = []
        self.added_max = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: int) -> None:
        self.added.append((name, prompt["prompt_token_ids"], []))
        self.added_max = max(self.added_max, len(self.added))

    def step(self) -> list[Any]:
        name, prompt, tokens = self.added[0]
        tokens.append(prompt[0])
        finished = len(tokens) == 3
        if finished:
            self.added.pop(0)
        return [Output(name, finished, tokens)]


class Output:
    def __init__(self, name: str, finished: bool, tokens: list[int]) -> None:
        self.request_id, self.finished, self.num_cached_tokens = name, finished, 7
        self.outputs = [type("Completion", (), {"token_ids": tokens})]


def test_a_stream_answers_every_request_in_its_place_when_it_is_due() -> None:
    machine = Machine()
    reply = stream(machine, [3] * 9, [[number] for number in range(9)], None, 2)
    assert [output["tokens"] for output in reply["outputs"]] == [[n] * 3 for n in range(9)]
    assert machine.added_max == 2
    for output in reply["outputs"]:
        assert sum(output["gaps_s"]) == pytest.approx(2 * output["tpot_s"])
        assert len(output["gaps_s"]) == 2
    assert all(0 <= output["ttft_s"] <= reply["elapsed_s"] for output in reply["outputs"])
    due_s = [0.0, 0.05, 0.05]
    reply = stream(Machine(), [3] * 3, [[1], [2], [3]], due_s, 1)
    assert [output["sent_s"] for output in reply["outputs"]] == due_s
    assert reply["elapsed_s"] >= 0.05


def test_a_summary_counts_all_replies() -> None:
    reply = stream(Machine(), [3] * 2, [[1], [2]], None, 1) | {"figures": {"load_bytes": 5}}
    row = summary([reply, reply])
    assert (row["requests"], row["output_tokens"], row["cached_tokens"]) == (4, 12, 28)
    assert row["qps"] == pytest.approx(4 / (2 * reply["elapsed_s"]))
    assert row["load_bytes"] == 10
    assert min(row["ttfts_s"]) <= row["ttft_mean_s"] <= row["ttft_p99_s"] <= max(row["ttfts_s"])


def rows(**fields: Any) -> list[dict[str, Any]]:
    """Make a row for each of two arms."""
    times = dict.fromkeys(("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "qps"), 0.5)
    work = {"requests": 4, "prompt_tokens": 4100, "output_tokens": 64, "full_tokens": 4096}
    return [
        {"arm": arm, "length": 1025, "cached_tokens": cached, "repeated_tokens": 1152}
        | times
        | work
        | fields
        for arm, cached in (("plain", 1152), ("beluga", 4096))
    ]


@pytest.fixture
def report() -> dict[str, Any]:
    passes = rows(**{"pass": 1}) + rows(**{"pass": 2})
    rates = rows(rate_per_s=1.5)
    variant = {"variant": "blocks-32", "block_tokens": 32, "interleave": True, "load_s": 0.01}
    variant |= {"ttft_miss_s": 1.0, "ttft_hit_s": 0.1, "ttft_local_hit_s": 0.1}
    variant |= {"hit_tokens": 1024, "full_tokens": 1024, "outputs_identical": True}
    variants = [variant | {"arm": arm, "load_limit_s": 0.01} for arm in ("usual", "blocks-32")]
    return {
        "machine": "a machine",
        "model": "tiny",
        "commit": "abc",
        "passes": passes,
        "rates": rates,
        "variants": variants,
        "verdict": verdict(passes, rates, variants),
        "peers_skipped": {"lmcache": "no such package"},
    }


def test_only_a_run_of_equal_work_with_only_hits_passes(report: dict[str, Any]) -> None:
    assert report["verdict"]["passed"]
    assert report["verdict"]["full_hits"] == {"beluga": True}
    for part, index, field, value in (
        ("passes", -1, "cached_tokens", 4095),
        ("rates", -1, "cached_tokens", 0),
        ("passes", 0, "output_tokens", 63),
        ("rates", 0, "requests", 3),
        ("variants", 1, "hit_tokens", 992),
        ("variants", 0, "outputs_identical", False),
    ):
        changed = copy.deepcopy(report)
        changed[part][index][field] = value
        judged = verdict(changed["passes"], changed["rates"], changed["variants"])
        assert not judged["passed"], field


def test_tables_and_charts_show_every_arm_and_what_was_skipped(
    report: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    print_tables(report)
    printed = capsys.readouterr().out
    names = ("plain", "beluga", "blocks-32", "no such package", "beluga yes")
    assert [name for name in names if name not in printed] == []
    paths = draw(report, tmp_path)
    assert [path.stem for path in paths] == ["vllm-passes", "vllm-rates", "vllm-variants"]
    assert all("<svg" in path.read_text() for path in paths)


def tier_row(arm: str, number: int, ttft_s: float, **changes: Any) -> dict[str, Any]:
    row = {
        "arm": arm,
        "prompt": number,
        "ttft_s": ttft_s,
        "ttft_local_hit_s": 0.1,
        "ttft_miss_s": 5.0,
        "cached_tokens": 256,
        "bytes_from_below": 1 << 20,
        "identical": True,
    }
    return row | changes


def test_tiers_are_compared_prompt_by_prompt() -> None:
    rows = [tier_row("beluga-disk", number, 0.2 + 0.1 * number) for number in range(3)]
    rows += [tier_row("lmcache-disk", number, 0.8) for number in range(2)]
    rows += [tier_row("beluga-redis", 0, 0.3)]
    by_tier = ratios(rows)
    assert set(by_tier) == {"disk"}
    assert by_tier["disk"]["pairs"] == 2
    assert by_tier["disk"]["min"] == pytest.approx(0.8 / 0.3)
    assert by_tier["disk"]["median"] == pytest.approx((4 + 0.8 / 0.3) / 2)
    assert medians_of("x", rows[:3])["over_local_hit_s"] == pytest.approx(0.2)
    good = tier_row("beluga-disk", 0, 0.2)
    assert whole([good], 256, 1 << 20)
    for change in ({"identical": None}, {"cached_tokens": 128}, {"bytes_from_below": 1000}):
        assert not whole([good, good | change], 256, 1 << 20)  # it came from another source


WHOLE = 3840


def answered(logprob: float, cached: int = WHOLE, failed: int = 0) -> dict[str, Any]:
    figures = {"load_failed_blocks": float(failed)}
    return {
        "tokens": [7],
        "logprobs": {"7": logprob},
        "cached_tokens": cached,
        "figures": figures,
    }


# these are rounded differently in bfloat16
COMPUTED, LOCAL = answered(-3.5174, cached=0), answered(-3.5481)


@pytest.mark.parametrize(
    ("hit", "is_like"),
    [
        (answered(-3.5481), True),
        # the answer equals a computed one, but all blocks count as loaded
        (answered(-3.5174), False),
        (answered(-3.5174, cached=0), True),  # a miss was computed like the first time
        (answered(-3.5481, cached=0), False),
        (answered(-3.5174, failed=30), True),  # announced but not loaded, and so computed
        (answered(-3.5481, failed=30), False),
        (answered(-3.5481, cached=1280), None),
        (answered(-3.5174, failed=7), None),
    ],
)
def test_a_hit_is_compared_with_an_answer_of_the_same_steps(
    hit: dict[str, Any], is_like: bool | None
) -> None:
    hit_tokens = loaded_tokens(hit, BLOCK)
    assert identical(hit, loaded=hit_tokens, whole=WHOLE, miss=COMPUTED, local=LOCAL) is is_like
    assert agreed([True, is_like]) is (is_like is not False)
    assert not agreed([None]), "a partial hit is not compared"


def test_counters_and_warnings_that_explain_a_miss_are_listed() -> None:
    saving = {"save_failures": 1.0, "save_skipped_blocks": 30.0, "save_s": 0.9, "mismatches": 0.0}
    assert faults(saving, {"lookup_failures": 1.0, "load_bytes": 5.0}) == {
        "lookup_failures": 1,
        "save_failures": 1,
        "save_skipped_blocks": 30,
    }
    assert faults({}) == {}
    line = "beluga saves: saving blocks: the server did not answer in time (after 612 ms)"
    log = f"WARNING 11-22 06:38:31 [link.py:230] {line}\nINFO beluga: blocks of 128 tokens\nWARNING"
    assert warnings(log) == [line]


# ---- The measurement of the demonstration.


class Played:
    """An engine that finds the given prompts, and takes a second for each other token."""

    def __init__(self, stored: set[int], logprob: float = -1.0) -> None:
        self.stored = stored
        self.logprob = logprob
        self.own: set[int] = set()
        self.saved = 0.0

    def generate(self, tokens: list[int], max_tokens: int = 8) -> dict[str, Any]:
        key = hash(tuple(tokens))
        cached = len(tokens) - 1 if key in self.own | self.stored else 0
        loaded = cached if key not in self.own else 0
        if len(tokens) > 100:
            self.own.add(key)
            self.stored.add(key)
            self.saved += len(tokens) - cached
        return {
            "ttft_s": len(tokens) - cached + loaded / 1000,
            "cached_tokens": cached,
            "tokens": [1, 2, 3],
            "logprobs": {"1": -1.0 if loaded == 0 else self.logprob},
            "figures": {"load_bytes": 2.0 * loaded, "load_s": loaded / 1000},
        }

    def log(self) -> str:
        return "WARNING beluga lookups: looking blocks up: nobody answered (after 500 ms)"

    def call(self, do: str, **_: Any) -> dict[str, Any]:
        assert do in ("figures", "flush")
        return {"figures": {"save_bytes": self.saved, "save_cpu_s": 0.5 * self.saved}}


def setting_of(folder: Path) -> Setting:
    return Setting(folder=folder, model=folder, size_name="tiny", tokens=1025)


def played_pairs(folder: Path, logprob: float = -1.0) -> list[Pair]:
    setting, stored = setting_of(folder), set[int]()
    engines: list[Any] = [Played(stored), Played(stored, logprob)]
    alone: list[Any] = [Played(set())]
    return [
        Pair(Arm(name="plain", setting=setting), alone),
        Pair(Arm(name="beluga", setting=setting, connector={}), engines),
    ]


def measured(folder: Path, logprob: float = -1.0) -> tuple[dict[str, list[Sample]], list[float]]:
    pairs = played_pairs(folder, logprob)
    fresh = prompts(1025, seed=1)
    return run(pairs, fresh, count=4, limit=lambda: 0.25, progress=lambda _: None)


def test_the_report_has_the_requested_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = setting_of(tmp_path)
    samples, limits = measured(tmp_path)
    for sample in samples["beluga"]:  # a miss, then a hit in the pool, then a local hit
        assert sample.hit is not None
        assert sample.miss["cached_tokens"] == 0
        assert sample.hit["cached_tokens"] == sample.local["cached_tokens"] == 1024
        assert sample.hit["figures"]["load_bytes"] > 0 == sample.local["figures"]["load_bytes"]
        assert sample.saving == {"save_bytes": 1025, "save_cpu_s": 512.5}
    assert [sample.hit for sample in samples["plain"]] == [None] * 4
    samples["other"] = samples["beluga"]
    report = report_of(setting, samples, limits, {"absent": "not here"})
    assert report == json.loads(json.dumps(report)) | {"quartiles": report["quartiles"]}
    assert report["prompt_tokens"] == 1025
    assert report["hit_tokens"] == 1024
    assert report["repetitions"] == 4
    assert report["ttft_miss_s"] == report["ttft_recompute_s"] == 1025
    assert report["ttft_local_hit_s"] == 1
    assert report["ttft_hit_s"] == 1 + report["load_s"] == pytest.approx(2.024)
    assert report["outputs_identical"] is True
    assert report["load_limit_s"] == 0.25 * report["load_bytes"] / setting.hit_bytes
    assert report["save_cpu_s"] == 512.5
    assert report["peers"] == {"other": report["ttft_hit_s"]}
    print_table(report)
    printed = capsys.readouterr().out
    assert "absent: skipped, not here" in printed
    assert "outputs identical" in " ".join(printed.split())
    hit = samples["beluga"][2].hit
    assert hit is not None
    hit["cached_tokens"] = 0  # one miss among hits
    assert report_of(setting, samples, limits, {})["hit_tokens"] == 0
    samples, limits = measured(tmp_path, logprob=-1.0000000000000002)  # one bit
    assert report_of(setting, samples, limits, {})["outputs_identical"] is False
    assert medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}
    assert [quartiles(values) for values in ([1.0, 2.0, 3.0, 4.0, 5.0], [7.0])] == [
        (2.0, 4.0),
        (7.0, 7.0),
    ]


def test_a_partial_hit_is_retried_and_reported(tmp_path: Path) -> None:
    pairs = played_pairs(tmp_path)
    engine: Any = pairs[1]._b
    whole, forget = engine.generate, iter([True])

    def forgetful(tokens: list[int], max_tokens: int = 8) -> dict[str, Any]:
        if len(tokens) > 100 and next(forget, False):
            engine.stored.clear()
        return dict(whole(tokens, max_tokens))

    engine.generate = forgetful
    fresh = prompts(1025, seed=1)
    messages: list[str] = []
    samples, limits = run(pairs, fresh, count=2, limit=lambda: 0.25, progress=messages.append)
    assert "beluga: 0 of 1024 tokens were found: nothing counted" in messages
    assert any("nobody answered (after 500 ms)" in line for line in messages)
    report = report_of(setting_of(tmp_path), samples, limits, {})
    assert report["hit_tokens"] == 1024
    assert report["tried_again"] == {"plain": 0, "beluga": 1}


def test_the_limit_loop_takes_longer_for_more_bytes(tmp_path: Path) -> None:
    with limit_loop(tmp_path, 1_000_000) as small, limit_loop(tmp_path, 48_000_000) as large:
        fastest = [min(loop.seconds() for _ in range(5)) for loop in (small, large)]
    assert 0 < fastest[0] < fastest[1]


# ---- Children and their prompts.


def test_an_engine_has_room_for_more_than_two_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SIZES["mid"].token_bytes() == 24576
    assert SIZES["mid"].token_bytes(element_bytes=4) == 49152
    options = options_of(tmp_path, SIZES["mid"], tokens=3841)
    assert options["kv_cache_memory_bytes"] >= 2 * 3841 * 24576
    assert options["max_model_len"] > 3841
    assert options["kv_transfer_config"] is None
    monkeypatch.setenv("VLLM_SOMETHING", "else")
    environment = environment_of(tmp_path)
    assert "VLLM_SOMETHING" not in environment, "of the shell"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["PATH"] == os.environ["PATH"]


def test_prompts_repeat_by_seed_and_share_no_first_token_block() -> None:
    assert prompt(300, 7) == prompt(300, 7)
    several = list(islice(prompts(300, 7), 20))
    assert len({tuple(tokens[:16]) for tokens in several}) == 20
    assert several[0] == prompt(300, 7)
    assert all(3 <= token < VOCABULARY for tokens in several for token in tokens)


def test_a_child_that_dies_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "poor.log"
    with (
        pytest.raises(ChildError, match=r"(?s)poor: ended with status 3.*all is lost"),
        Child([sys.executable, "-c", "print('all is lost'); exit(3)"], log=log) as child,
    ):
        child.wait_for(lambda: False, 60, "answer")


def test_closing_a_child_ends_its_own_children(tmp_path: Path) -> None:
    code = "import subprocess as s; print(s.Popen(['sleep', '600']).pid, flush=True); input()"
    log = tmp_path / "mother.log"
    with Child(["sh", "-c", f'{sys.executable} -c "{code}"; sleep 600'], log=log) as child:
        child.wait_for(lambda: child.log().endswith("\n"), 60, "pid")
        grandchild = Path("/proc") / child.log().split()[0]
    assert ends(grandchild)


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, signal
from beluga_bench.vllm.process import Child
print(Child(["sleep", "600"], log=pathlib.Path({str(tmp_path)!r}, "x.log")).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ends(Path("/proc") / parent.stdout.decode().strip())


def ends(process: Path) -> bool:
    """Return whether the process soon ends or is a zombie."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = process.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False
