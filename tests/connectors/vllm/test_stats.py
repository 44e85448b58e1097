# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The connector's figures as vLLM adds them up, logs them and exports them to Prometheus."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import fake_vllm
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, generate_latest
from support.prometheus_lint import complaints


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake_vllm.installed(monkeypatch)
    yield importlib.import_module("beluga.connectors.vllm.stats")
    for name in fake_vllm.OURS:
        sys.modules.pop(f"beluga.connectors.vllm.{name}", None)


def test_stats_of_processes_are_summed(stats: Any) -> None:
    one = stats.BelugaStats(data={"loads": 1, "load_s": 0.5})
    other = stats.BelugaStats(data={"loads": 2, "save_blocks": 7})
    assert one.aggregate(other) is one
    assert one.data == {"loads": 3, "load_s": 0.5, "save_blocks": 7}


def test_a_log_line_shows_the_changes_since_the_last_one(stats: Any) -> None:
    found = stats.BelugaStats(data={"save_blocks": 7, "lookups": 0, "load_s": 0.123456})
    assert found.reduce() == {"load_s": 0.1235, "save_blocks": 7}
    space = stats.BelugaStats(data={"space": "00ff"})
    assert not space.is_empty()
    assert found.aggregate(space).aggregate(space).data["space"] == "00ff"
    assert "space" not in found.reduce()


def test_after_a_reset_all_counters_are_zero(stats: Any) -> None:
    found = stats.BelugaStats(data={"loads": 1})
    assert not found.is_empty()
    found.reset()
    assert found.is_empty()
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
