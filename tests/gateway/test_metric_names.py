# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway's metrics have names that follow Prometheus's rules; Dynamo's stay as they are."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engine import FakeEngine
from routed import routed, until
from support.prometheus_lint import complaints

# Dynamo counts the parts of routing in milliseconds.
KNOWN = re.compile(
    r"dynamo_router_overhead_\w+_ms(_created)? metric names should not contain abbreviated units"
)


async def test_promtool_reports_no_error() -> None:
    pages = []
    async with routed(FakeEngine(), policy="linear") as site:
        assert (await site.completed(prompt=[*range(64)]))[0] == 200
        assert (await site.completed(model="unknown"))[0] == 404
        [worker] = site.service.fleet
        await until(lambda: bool(worker.problems))
        pages.append(await site.text("/metrics"))
    [page] = pages
    found = complaints(page.encode())
    assert [line for line in found if line and not KNOWN.fullmatch(line)] == []
    assert {line.split("_ms")[0] for line in found if line} <= {
        f"dynamo_router_overhead_{part}"
        for part in ("block_hashing", "indexer_find_matches", "seq_hashing", "scheduling", "total")
    }
    names = set(re.findall("^# TYPE ([a-z0-9_]+) ", page, re.MULTILINE))
    assert {name.partition("_")[0] for name in names} == {"beluga", "dynamo"}


def test_faults_are_reported() -> None:
    assert any("_total" in line for line in complaints(b"# TYPE a counter\na 1\n"))
