# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Rows and reports: every figure of a run that is small enough to be computed by hand."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from beluga.errors import SimulateError
from beluga.simulate import Options, Prompt, Row, Scale, make_trace, write_report
from beluga.simulate.request import Request
from beluga.simulate.result import make_row, mean_row

BLOCK = 10  # tokens


def request(arrival: float, ttft: float, *, out: int, done: float, found: tuple[int, int]) -> Any:
    made = Request(0, arrival, (25, out, BLOCK), None, 2)
    made.first_token, made.done = arrival + ttft, arrival + ttft + done
    made.device, made.far = found
    return made


def cluster(*requests: Request, memory: str = "pool", **options: Any) -> Any:
    """Make a cluster after a run of 20 s with two workers and two copies of one second each."""
    return SimpleNamespace(
        requests=list(requests),
        trace=SimpleNamespace(block_tokens=BLOCK),
        memory=memory,
        refused=1,
        end_s=20.0,
        worker_s=7200.0,
        engines=[SimpleNamespace(busy_s=busy) for busy in (3.0, 1.0)],
        options=Options(workers=2, pool=1000, local=300, **options),
        network=SimpleNamespace(
            utilisation=lambda elapsed_s: (elapsed_s / 40, elapsed_s / 80),
            read=SimpleNamespace(count=2, busy_s=2.0, waited_s=0.5),
        ),
    )


def row(*requests: Request, seed: int = 7, **options: Any) -> Row:
    return make_row(cluster(*requests, **options), policy="random", seed=seed)


REQUESTS = (
    request(0.0, 1.0, out=11, done=2.0, found=(1, 1)),
    request(5.0, 3.0, out=1, done=0.0, found=(0, 2)),
    request(9.0, 2.0, out=3, done=0.8, found=(0, 0)),
    Request(3, 10.0, (25, 2, BLOCK), None, 2),  # refused
)


def test_a_row_has_the_means_of_what_was_served() -> None:
    found = row(*REQUESTS)
    assert (found.policy, found.memory, found.seed) == ("random", "pool", 7)
    assert (found.requests, found.rejects) == (4, 1)
    assert found.ttft_mean_s == found.ttft_p50_s == pytest.approx(2.0)
    assert found.ttft_p90_s == pytest.approx(2.8)
    assert found.ttft_p99_s == pytest.approx(2.98)
    # There are 10 further tokens in 2 s, and 2 in 0.8 s. An answer of one token has none.
    assert found.tpot_mean_ms == pytest.approx(300)
    assert found.tpot_p99_ms == pytest.approx(398)
    assert found.throughput_per_s == 3 / 20


def test_hit_rates_count_blocks_and_their_tails() -> None:
    found = row(*REQUESTS)
    assert found.hit_rate == pytest.approx(4 / 9)
    assert found.hit_rate_hbm == pytest.approx(1 / 9)
    assert (found.hit_rate_pool, found.hit_rate_local) == (pytest.approx(3 / 9), 0)
    assert found.hit_rate_tokens == pytest.approx(40 / 75)
    split = row(*REQUESTS, memory="split")
    assert (split.hit_rate_pool, split.hit_rate_local) == (0, pytest.approx(3 / 9))


def test_a_row_says_what_workers_and_links_did() -> None:
    found = row(*REQUESTS)
    assert found.load_imbalance == 1.5
    assert (found.link_read_utilisation, found.link_write_utilisation) == (0.5, 0.25)
    assert (found.onboard_ms, found.onboard_queue_ms) == (1000, 250)
    assert (found.workers, found.workers_most, found.worker_hours) == (2, 2, 2)
    assert found.capacity_bytes == 1000
    assert row(memory="split").capacity_bytes == 600


def test_before_and_after_are_told_apart_by_arrival() -> None:
    found = row(*REQUESTS, scale=Scale(5.0, 1))
    assert (found.hit_rate_before, found.hit_rate_after) == (2 / 3, 2 / 6)
    assert (found.ttft_mean_before_s, found.ttft_mean_after_s) == (1.0, 2.5)
    late = row(*REQUESTS, scale=Scale(0.0, 1))
    assert (late.hit_rate_before, late.ttft_mean_before_s) == (None, None)
    never = row(*REQUESTS)
    assert (never.hit_rate_before, never.hit_rate_after) == (None, None)
    assert (never.ttft_mean_before_s, never.ttft_mean_after_s) == (None, None)


def test_a_run_that_served_nothing_has_no_times() -> None:
    idle = cluster(REQUESTS[3])
    idle.end_s = 0.0
    idle.network.read = SimpleNamespace(count=1, busy_s=3.0, waited_s=2.0)
    idle.engines = [SimpleNamespace(busy_s=0.0)]
    found = make_row(idle, policy="random", seed=0)
    assert (found.ttft_mean_s, found.ttft_p99_s, found.tpot_mean_ms) == (None, None, None)
    assert found.load_imbalance == 1
    assert (found.throughput_per_s, found.hit_rate, found.hit_rate_tokens) == (0, 0, 0)
    assert (found.onboard_ms, found.onboard_queue_ms) == (3000, 2000)


def test_one_row_stands_for_all_seeds() -> None:
    one, two = row(*REQUESTS[:1], seed=0), row(*REQUESTS[1:2], seed=1)
    mean = mean_row([one, two])
    assert mean.seed is None
    assert mean.ttft_mean_s == 2.0
    assert (mean.requests, mean.workers, mean.capacity_bytes) == (1, 2, 1000)
    assert mean.spread is not None
    spread = mean.spread["ttft_mean_s"]
    assert (spread.min, spread.max, spread.std) == (1, 3, 1)
    assert not {"requests", "workers", "capacity_bytes", "seed"} & set(mean.spread)


@pytest.mark.parametrize("first", [0, 1])
def test_a_mean_is_of_the_runs_that_have_the_figure(first: int) -> None:
    seeds = [row(*REQUESTS[first : first + 1]), row(*REQUESTS[1 - first : 2 - first])]
    mean = mean_row(seeds)
    assert mean.tpot_mean_ms == pytest.approx(200)
    assert mean.spread is not None and mean.spread["tpot_mean_ms"].std == 0
    assert (mean.hit_rate_before, "hit_rate_before" in mean.spread) == (None, False)


TRACE = make_trace("a<b", BLOCK, [Prompt(0, 25, 2, (1, 2)), Prompt(1, 25, 2, (1, 2))], 1.0)


@pytest.fixture
def rows() -> list[Row]:
    """Make the rows of one policy on a pool with two seeds, which the report leaves out, and their
    mean; and of another policy on split DRAM that served nothing.
    """
    one = row(*REQUESTS[:1], seed=0)
    two = row(*REQUESTS[1:2], seed=1)
    none = dataclasses.replace(
        row(memory="split"), policy="<none>", seed=None, ttft_mean_s=None, hit_rate=0.125
    )
    return [one, two, mean_row([one, two]), none]


def charts(page: str) -> dict[str, str]:
    return dict(re.findall(r"<h2>(.*?)</h2>(<svg.*?</svg>)", page))


def test_a_bar_is_as_long_as_its_share_of_the_most_of_all_seeds(
    tmp_path: Path, rows: list[Row]
) -> None:
    write_report(tmp_path / "r.html", TRACE, Options(workers=2), rows)
    found = charts((tmp_path / "r.html").read_text())
    assert found["Mean time to first token, s"] == (
        '<svg width="530" height="32" role="img" font-size="12" font-family="sans-serif">'
        '<text x="0" y="12">random</text>'
        '<rect x="130" y="1" width="220.0" height="12" fill="#2a6fbb"/>'
        '<path d="M240.0 7.0H460.0" stroke="#000"/>'
        '<text x="466" y="12">2</text>'
        '<text x="0" y="28">&lt;none&gt;</text></svg>'
    )
    assert (
        '<rect x="130" y="17" width="61.9" height="12" fill="#c9822b"/>'
        '<text x="466" y="28">12.5%</text>'
    ) in found["Blocks that were found"]


def test_a_report_of_nothing_has_charts_without_bars(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", TRACE, Options(), [])
    found = charts((tmp_path / "r.html").read_text())
    assert len(found) == 5
    assert all('height="0"' in chart and "<rect" not in chart for chart in found.values())


def test_a_page_says_what_was_simulated(tmp_path: Path, rows: list[Row]) -> None:
    options = Options(
        workers=2, hbm=80 * 10**9, pool=3 * 10**12, local=500 * 10**9, bandwidth=7e9, speed=2.0
    )
    write_report(tmp_path / "r.html", TRACE, options, rows)
    page = (tmp_path / "r.html").read_text()
    assert "a&lt;b at 2x: 2 workers, qwen3-32b-h200, chunked engines" in page
    assert "2 requests, 10 tokens a block" in page
    assert "33.3% of the blocks" in page
    assert (
        "80 GB of HBM a worker; behind it a pool of 3.00 TB at 7 GB/s a worker (1 adapters, "
        "11 devices), or 500 GB of its own DRAM at 50 GB/s"
    ) in page
    table = page[page.index("<table>") :]
    assert table.count("<tr>") == 3
    assert "<th>ttft mean s</th>" in table
    assert "<td>random</td><td>pool</td><td>2</td>" in table
    assert "<td>&lt;none&gt;</td><td>split</td><td>-</td>" in table


def test_a_picture_has_a_bar_for_each_row_the_first_on_top(
    tmp_path: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    save = figures.Figure.savefig

    def savefig(figure: Any, path: Path) -> None:
        drawn.append(figure)
        save(figure, path)

    monkeypatch.setattr(figures.Figure, "savefig", savefig)
    write_report(tmp_path / "r.png", TRACE, Options(), rows)
    assert struct.unpack(">2I", (tmp_path / "r.png").read_bytes()[16:24]) == (1400, 244)
    [figure] = drawn
    first, *others = figure.axes
    assert first.get_title() == "Mean time to first token, s"
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "random (pool)",
        "<none> (split)",
    ]
    assert [bar.get_width() for bar in first.patches] == [2.0, 0.0]
    assert first.patches[0].get_facecolor() != first.patches[1].get_facecolor()
    assert first.yaxis_inverted() and all(axes.yaxis_inverted() for axes in others)
    assert len(figure.axes) == 5
    assert "(simulated)" in figure.get_suptitle()


def test_a_report_where_nobody_may_write_is_refused(tmp_path: Path, rows: list[Row]) -> None:
    with pytest.raises(SimulateError, match=r"none/r\.html: No such file"):
        write_report(tmp_path / "none/r.html", TRACE, Options(), rows)
    with pytest.raises(SimulateError, match=r"a report is \.html or \.png"):
        write_report(tmp_path / "r.txt", TRACE, Options(), rows)
