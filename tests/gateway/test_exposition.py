# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The metrics of several processes are added up as those of one gateway."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import msgspec
from fake_engine import FakeEngine
from routed import routed, run

from beluga.gateway.exposition import Family, Series, counts_of, families_of, merged, text_of


def family(name: str, kind: str, value: float, **labels: str) -> Family:
    suffix = "_total" if kind == "counter" else ""
    return Family(name, kind, "help", [Series(name + suffix, labels, value)])


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("requests", "counter", 5),
        ("beluga_gateway_worker_requests", "gauge", 5),
        ("dynamo_frontend_router_queue_pending_requests", "gauge", 5),
        ("beluga_gateway_worker_up", "gauge", 3),
        ("beluga_gateway_pool_up_to_date", "gauge", 2),
    ],
)
def test_values_are_combined_by_their_meaning(name: str, kind: str, value: float) -> None:
    (found,) = merged([[family(name, kind, 2, worker="a")], [family(name, kind, 3, worker="a")]])
    assert [one.value for one in found.series] == [value]


def test_series_of_a_single_process_are_kept() -> None:
    found = merged(
        [[family("a", "counter", 2, worker="x")], [family("a", "counter", 3, worker="y")]]
    )
    assert [(one.labels["worker"], one.value) for one in found[0].series] == [("x", 2), ("y", 3)]


def test_only_counts_of_present_workers_outlive_a_process() -> None:
    families = [
        family("sent", "counter", 2, worker="x"),
        family("routed", "counter", 3),
        family("up", "gauge", 1, worker="x"),
    ]
    assert [one.name for one in counts_of(families)] == ["sent", "routed"]
    assert [len(one.series) for one in counts_of(families, ["y"])] == [0, 1]
    assert [len(one.series) for one in counts_of(families, ["x"])] == [1, 1]


def test_one_process_has_the_text_of_its_own_registry() -> None:
    async def scenario() -> None:
        async with routed(FakeEngine()) as site:
            assert (await site.completed())[0] == 200
            expected = await site.text("/metrics")
            registry = site.service.metrics.registry
            sent = msgspec.json.encode(families_of(registry))
            text = text_of(merged([msgspec.json.decode(sent, type=list[Family])])).decode()
            assert sorted(text.splitlines()) == sorted(expected.splitlines())

    run(scenario)
