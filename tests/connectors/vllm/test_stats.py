# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The connector's figures as vLLM adds them up, logs them and exports them to Prometheus."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from beluga_bench.vllm.arm import Arm, Setting
from beluga_bench.vllm.limit import limit_loop
from beluga_bench.vllm.measure import Pair, Sample, medians, quartiles, run
from beluga_bench.vllm.prompts import prompts
from beluga_bench.vllm.report import print_table, report_of
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, generate_latest
from support.prometheus_lint import complaints


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake_vllm.installed(monkeypatch)
    yield importlib.import_module("beluga.connectors.vllm.stats")
    for name in fake_vllm.OURS:
        sys.modules.pop(f"beluga.connectors.vllm.{name}", None)


def test_stats_of_processes_are_summed(stats: Any) -> None:
    part = stats.BelugaStats(data={"loads": 1, "load_s": 0.5})
    other = stats.BelugaStats(data={"loads": 2, "save_blocks": 7})
    assert part.aggregate(other) is part
    assert part.data == {"loads": 3, "load_s": 0.5, "save_blocks": 7}


def test_a_log_line_shows_the_changes_since_the_last_one(stats: Any) -> None:
    counted = stats.BelugaStats(data={"save_blocks": 7, "lookups": 0, "load_s": 0.123456})
    assert counted.reduce() == {"load_s": 0.1235, "save_blocks": 7}
    space = stats.BelugaStats(data={"space": "00ff"})
    assert not space.is_empty()
    assert counted.aggregate(space).aggregate(space).data["space"] == "00ff"
    assert "space" not in counted.reduce()


def test_after_a_reset_all_counters_are_zero(stats: Any) -> None:
    counted = stats.BelugaStats(data={"loads": 1})
    assert not counted.is_empty()
    counted.reset()
    assert counted.is_empty()
    assert stats.BelugaStats(data={"loads": 0}).is_empty()


class Counted:
    """A Prometheus counter or gauge with labels."""

    made: dict[str, Counted]

    def __init__(self, *, name: str, documentation: str, labelnames: list[str]) -> None:
        self.documentation, self.labelnames = documentation, labelnames
        self.amounts: dict[Any, float] = {}
        self.made[name] = self

    def labels(self, *values: Any) -> Any:
        counter = self

        class Child:
            def inc(self, amount: float) -> None:
                counter.amounts[values] = counter.amounts.get(values, 0) + amount

            def set(self, amount: float) -> None:
                counter.amounts[values] = amount

        return Child()


def test_each_engine_has_separate_counters(stats: Any) -> None:
    Counted.made = {}
    labels = {0: ["model", "0"], 1: ["model", "1"]}
    config = object()
    kinds = {Counter: Counted, Gauge: Counted}
    metrics = stats.BelugaMetrics(config, kinds, ["model_name", "engine"], labels)
    assert metrics.arguments[0] is config
    metrics.observe({"load_blocks": 3, "load_s": 0.5, "unknown": 1, "loads": 0}, 1)
    metrics.observe({"load_blocks": 2})
    metrics.observe({"load_blocks": 2}, 1)
    blocks = Counted.made["beluga_vllm_load_blocks"]
    assert blocks.amounts == {("model", "1"): 5, ("model", "0"): 2}
    assert blocks.documentation == "Beluga: blocks loaded."
    assert blocks.labelnames == ["model_name", "engine"]
    assert Counted.made["beluga_vllm_load_seconds"].amounts == {("model", "1"): 0.5}
    assert Counted.made["beluga_vllm_loads"].amounts == {}
    metrics.observe({"space": "00ff"}, 1)
    space = Counted.made["beluga_vllm_space_info"]
    assert space.labelnames == ["model_name", "engine", "space"]
    assert space.amounts == {("model", "1", "00ff"): 1}


def test_a_second_engine_in_a_process_registers_its_metrics(stats: Any) -> None:
    for _ in range(2):
        metrics = stats.BelugaMetrics(object(), {Counter: Counter, Gauge: Gauge}, ["e"], {0: ["0"]})
        metrics.observe({"loads": 3, "space": "00ff"})
        assert REGISTRY.get_sample_value("beluga_vllm_loads_total", {"e": "0"}) == 3
    stats.forget_collectors()
    assert REGISTRY.get_sample_value("beluga_vllm_loads_total", {"e": "0"}) is None


def test_promtool_reports_no_error(stats: Any) -> None:
    registry = CollectorRegistry()
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge)}
    metrics = stats.BelugaMetrics(object(), kinds, ["engine"], {0: ["0"]})
    metrics.observe({**dict.fromkeys(stats.NAMES, 1), "space": "00ff"})
    page = generate_latest(registry)
    assert b'beluga_vllm_load_bytes_total{engine="0"} 1.0' in page
    assert complaints(page) == []


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


def played(folder: Path, logprob: float = -1.0) -> list[Pair]:
    setting, stored = setting_of(folder), set[int]()
    engines: list[Any] = [Played(stored), Played(stored, logprob)]
    alone: list[Any] = [Played(set())]
    return [
        Pair(Arm(name="plain", setting=setting), alone),
        Pair(Arm(name="beluga", setting=setting, connector={}), engines),
    ]


def measured(folder: Path, logprob: float = -1.0) -> tuple[dict[str, list[Sample]], list[float]]:
    pairs = played(folder, logprob)
    fresh = prompts(1025, seed=1)
    return run(pairs, fresh, count=4, limit=lambda: 0.25, progress=lambda _: None)


def test_a_repetition_has_a_miss_then_a_pool_hit_then_a_local_hit(tmp_path: Path) -> None:
    samples, limits = measured(tmp_path)
    assert limits == [0.25] * 4
    for sample in samples["beluga"]:
        assert sample.hit is not None
        assert sample.miss["cached_tokens"] == 0
        assert sample.hit["cached_tokens"] == sample.local["cached_tokens"] == 1024
        assert sample.hit["figures"]["load_bytes"] > 0 == sample.local["figures"]["load_bytes"]
        assert sample.saving == {"save_bytes": 1025, "save_cpu_s": 512.5}
    assert [sample.hit for sample in samples["plain"]] == [None] * 4


def test_the_report_has_the_requested_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = setting_of(tmp_path)
    samples, limits = measured(tmp_path)
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


def test_one_bit_of_a_logprob_is_a_difference(tmp_path: Path) -> None:
    samples, limits = measured(tmp_path, logprob=-1.0000000000000002)
    assert report_of(setting_of(tmp_path), samples, limits, {})["outputs_identical"] is False


def test_one_miss_among_hits_is_reported(tmp_path: Path) -> None:
    samples, limits = measured(tmp_path)
    hit = samples["beluga"][2].hit
    assert hit is not None
    hit["cached_tokens"] = 0
    assert report_of(setting_of(tmp_path), samples, limits, {})["hit_tokens"] == 0


def test_a_partial_hit_is_retried_and_reported(tmp_path: Path) -> None:
    pairs = played(tmp_path)
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


def test_the_report_has_medians_and_quartiles() -> None:
    assert medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0)


def test_the_limit_loop_takes_longer_for_more_bytes(tmp_path: Path) -> None:
    with limit_loop(tmp_path, 1_000_000) as small, limit_loop(tmp_path, 48_000_000) as large:
        fastest = [min(loop.seconds() for _ in range(5)) for loop in (small, large)]
    assert 0 < fastest[0] < fastest[1]
