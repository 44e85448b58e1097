# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The registry of metrics: series by labels, kinds, quantiles."""

from __future__ import annotations

import math
import threading

import pytest

from beluga.metrics import Distribution, Registry, prometheus_text


def test_series_are_distinguished_by_their_labels() -> None:
    registry = Registry()
    saved = registry.counter("saved_total", "Blocks saved.")
    saved.add(tier="a")
    saved.add(2, tier="b")
    assert registry.counter("saved_total", "") is saved
    assert (saved.value(tier="a"), saved.value(tier="b"), saved.value()) == (1, 2, 0)
    assert registry.snapshot()["saved_total"].series == {
        (("tier", "a"),): 1,
        (("tier", "b"),): 2,
    }


def test_a_name_has_one_kind_and_a_counter_only_grows() -> None:
    registry = Registry()
    counter = registry.counter("one", "")
    with pytest.raises(ValueError, match="one is a counter already"):
        registry.gauge("one", "")
    with pytest.raises(ValueError, match="cannot fall by 1"):
        counter.add(-1)


def test_a_gauge_may_be_a_function_that_is_called_when_it_is_read() -> None:
    registry, values = Registry(), [3.0]
    gauge = registry.gauge("blocks", "")
    gauge.set(lambda: values[0], tier="a")
    values[0] = 5.0
    assert registry.snapshot()["blocks"].series == {(("tier", "a"),): 5.0}
    gauge.remove(tier="a")
    assert registry.snapshot()["blocks"].series == {}


def test_a_value_at_a_bound_belongs_to_that_bound() -> None:
    histogram = Registry().histogram("wait_seconds", "", (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    found = histogram.value()
    assert (found.counts, found.count, found.total) == ((2, 1, 1), 4, pytest.approx(7.65))
    assert [found.quantile(share) for share in (0.5, 0.75, 1.0)] == [0.1, 1.0, float("inf")]
    assert Distribution((0.1,), (0, 0), 0.0).quantile(0.9) == 0.0


def test_threads_lose_no_count() -> None:
    counter = Registry().counter("calls_total", "")

    def count() -> None:
        for _ in range(2000):
            counter.add(kind="x")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value(kind="x") == 8000


def test_the_text_of_prometheus_escapes_labels_and_counts_buckets_up() -> None:
    registry = Registry()
    registry.counter("a_total", 'Of a "path"\\or\nline.').add(3, path='x"\\\n')
    registry.gauge("b", "B.").set(0.25)
    times = registry.histogram("c_seconds", "C.", bounds=(0.5, 1.0))
    for value in (0.1, 0.2, 0.7, 9.0):
        times.observe(value, op="get")
    assert prometheus_text(registry.snapshot()).splitlines() == [
        '# HELP a_total Of a "path"\\\\or\\nline.',
        "# TYPE a_total counter",
        'a_total{path="x\\"\\\\\\n"} 3',
        "# HELP b B.",
        "# TYPE b gauge",
        "b 0.25",
        "# HELP c_seconds C.",
        "# TYPE c_seconds histogram",
        'c_seconds_bucket{op="get",le="0.5"} 2',
        'c_seconds_bucket{op="get",le="1"} 3',
        'c_seconds_bucket{op="get",le="+Inf"} 4',
        'c_seconds_sum{op="get"} 10',
        'c_seconds_count{op="get"} 4',
    ]


def test_nan_and_infinity_are_written_for_prometheus() -> None:
    registry = Registry()
    gauge = registry.gauge("g", "G.")
    for name, value in (("a", math.inf), ("b", -math.inf), ("c", math.nan)):
        gauge.set(value, n=name)
    ends = [line.split()[1] for line in prometheus_text(registry.snapshot()).splitlines()[2:]]
    assert ends == ["+Inf", "-Inf", "NaN"]
