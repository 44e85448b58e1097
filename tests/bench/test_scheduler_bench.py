# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of the link scheduler: its rows, and that its model of a link shares fairly."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from beluga_bench import BENCHES, Options, Row
from beluga_bench.system.linkmodel import ONBOARD, Piece, Shared, run
from beluga_bench.system.orders import Fifo, orders
from beluga_bench.system.scheduler import RATE

from beluga.errors import BelugaError

MB = 1_000_000
GB = 1_000_000_000


@pytest.fixture(scope="module")
def rows(smoke: Callable[[str], list[Row]]) -> dict[str, Row]:
    return {str(row["case"]): row for row in smoke("scheduler")}


@pytest.mark.long
def test_every_order_and_the_decision_time_have_a_row(rows: dict[str, Row]) -> None:
    virtual = {f"{name}, {how}" for name in orders(RATE) for how in ("at random", "evenly")}
    decisions = {
        "decision",
        "decision, in C, alone",
        "decision, in C, beside another",
        "waiting, in C",
    }
    link = {f"caches, slow link, {how}" for how in ("ours", "one class")}
    memory = {f"caches, memory, {what}" for what in ("host's link", "no link")}
    assert rows.keys() == virtual | decisions | link | memory
    for case in link | memory:
        assert "processes that put" in str(rows[case]["note"])
        assert ("a piece waited" in str(rows[case]["note"])) == (case != "caches, memory, no link")
    for case in virtual:
        assert rows[case]["memory"] == "virtual time"
        assert float(str(rows[case]["ratio_to_limit"])) > 0.95
        assert "without offloads: p50" in str(rows[case]["note"])
    assert "only reads the clock" in str(rows["decision"]["note"])


@pytest.mark.long
def test_only_the_fair_queue_keeps_onboards_short(rows: dict[str, Row]) -> None:
    longer = {
        case: float(match[1])
        for case, row in rows.items()
        if (match := re.search(r"p99 ([\d.]+) times as long", str(row["note"])))
    }
    for how in ("at random", "evenly"):
        assert longer[f"ours, {how}"] <= 1.3
        for other in ("FIFO", "shared counter", "copy first"):
            assert longer[f"{other}, {how}"] > 1.5


@pytest.mark.long
def test_rows_in_virtual_time_are_reproducible(rows: dict[str, Row]) -> None:
    def made() -> list[int]:
        order = orders(RATE)["ours"]
        return run(
            order, bytes_per_s=RATE, onboard_share=0.5, offload=True, duration_ns=5 * MB, seed=3
        ).latencies_ns

    assert made() == made()


def test_a_pace_is_refused() -> None:
    with pytest.raises(BelugaError, match="pace"):
        BENCHES["scheduler"](Options(smoke=True, pace="device=1GB/s"))


@pytest.mark.parametrize(
    ("starts_us", "ends_us"),
    [
        ([0], [1000]),
        ([0, 0], [2000, 2000]),
        ([0, 500], [1500, 2000]),
        ([0] * 10, [10_000] * 10),
    ],
)
def test_the_link_shares_its_bandwidth_evenly(starts_us: list[int], ends_us: list[int]) -> None:
    """Dynamo's example for its own model: copies of a megabyte each over 1 GB/s."""
    link = Shared(GB)
    waiting = [(start * 1000, Piece(ONBOARD, key, MB)) for key, start in enumerate(starts_us)]
    ended: dict[int, int] = {}
    while len(ended) < len(starts_us):
        now = min([link.next_ns(), *(start for start, _ in waiting)])
        for piece in link.end(round(now)):
            ended[piece.block] = round(now / 1000)
        while waiting and waiting[0][0] <= now:
            link.start(waiting.pop(0)[1], round(now))
    assert [ended[key] for key in range(len(starts_us))] == ends_us


def test_the_time_on_an_idle_link_is_proportional_to_the_block() -> None:
    outcome = run(
        Fifo(), bytes_per_s=GB, onboard_share=0.3, offload=False, duration_ns=100 * MB, regular=True
    )
    expected = (5 << 19) / GB * 1e9
    assert all(abs(took - expected) < 100 for took in outcome.latencies_ns)
    assert outcome.utilisation == pytest.approx(0.3, abs=0.05)
