# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Rows and reports: every figure of a run that is small enough to be computed by hand."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
from page.well_formed import Page

from beluga.page import percent, plain, seconds
from beluga.simulate import Options, Row, Scale, TraceEntry, make_report, make_trace, simulate
from beluga.simulate.memory import Request
from beluga.simulate.report import summarize, sustained_load
from beluga.simulate.result import make_row, mean_row

BLOCK = 10  # tokens


def request(arrival: float, ttft: float, *, out: int, done: float, hits: tuple[int, int]) -> Any:
    made = Request(0, arrival, (25, out, BLOCK), None, 2)
    made.first_token, made.done = arrival + ttft, arrival + ttft + done
    made.device, made.far = hits
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
    request(0.0, 1.0, out=11, done=2.0, hits=(1, 1)),
    request(5.0, 3.0, out=1, done=0.0, hits=(0, 2)),
    request(9.0, 2.0, out=3, done=0.8, hits=(0, 0)),
    Request(3, 10.0, (25, 2, BLOCK), None, 2),  # refused
)


def test_a_row_has_the_means_of_served_requests() -> None:
    result = row(*REQUESTS)
    assert (result.policy, result.memory, result.seed) == ("random", "pool", 7)
    assert (result.requests, result.rejects) == (4, 1)
    assert result.ttft_mean_s == result.ttft_p50_s == pytest.approx(2.0)
    assert result.ttft_p90_s == pytest.approx(2.8)
    assert result.ttft_p99_s == pytest.approx(2.98)
    # There are 10 further tokens in 2 s, and 2 in 0.8 s. An answer of one token has none.
    assert result.tpot_mean_ms == pytest.approx(300)
    assert result.tpot_p99_ms == pytest.approx(398)
    assert result.throughput_per_s == 3 / 20


def test_hit_rates_count_blocks_and_their_tails() -> None:
    result = row(*REQUESTS)
    assert result.hit_rate == pytest.approx(4 / 9)
    assert result.hit_rate_hbm == pytest.approx(1 / 9)
    assert (result.hit_rate_pool, result.hit_rate_local) == (pytest.approx(3 / 9), 0)
    assert result.hit_rate_tokens == pytest.approx(40 / 75)
    split = row(*REQUESTS, memory="split")
    assert (split.hit_rate_pool, split.hit_rate_local) == (0, pytest.approx(3 / 9))


def test_a_row_has_the_work_of_workers_and_links() -> None:
    result = row(*REQUESTS)
    assert result.load_imbalance == 1.5
    assert (result.link_read_utilisation, result.link_write_utilisation) == (0.5, 0.25)
    assert (result.onboard_ms, result.onboard_queue_ms) == (1000, 250)
    assert (result.workers, result.workers_most, result.worker_hours) == (2, 2, 2)
    assert result.capacity_bytes == 1000
    assert row(memory="split").capacity_bytes == 600


def test_before_and_after_are_separated_by_arrival() -> None:
    result = row(*REQUESTS, scale=Scale(5.0, 1))
    assert (result.hit_rate_before, result.hit_rate_after) == (2 / 3, 2 / 6)
    assert (result.ttft_mean_before_s, result.ttft_mean_after_s) == (1.0, 2.5)
    late = row(*REQUESTS, scale=Scale(0.0, 1))
    assert (late.hit_rate_before, late.ttft_mean_before_s) == (None, None)
    never = row(*REQUESTS)
    assert (never.hit_rate_before, never.hit_rate_after) == (None, None)
    assert (never.ttft_mean_before_s, never.ttft_mean_after_s) == (None, None)


def test_a_run_without_served_requests_has_no_times() -> None:
    idle = cluster(REQUESTS[3])
    idle.end_s = 0.0
    idle.network.read = SimpleNamespace(count=1, busy_s=3.0, waited_s=2.0)
    idle.engines = [SimpleNamespace(busy_s=0.0)]
    result = make_row(idle, policy="random", seed=0)
    assert (result.ttft_mean_s, result.ttft_p99_s, result.tpot_mean_ms) == (None, None, None)
    assert result.load_imbalance == 1
    assert (result.throughput_per_s, result.hit_rate, result.hit_rate_tokens) == (0, 0, 0)
    assert (result.onboard_ms, result.onboard_queue_ms) == (3000, 2000)


def test_one_row_summarizes_all_seeds() -> None:
    first, second = row(*REQUESTS[:1], seed=0), row(*REQUESTS[1:2], seed=1)
    mean = mean_row([first, second])
    assert mean.seed is None
    assert mean.ttft_mean_s == 2.0
    assert (mean.requests, mean.workers, mean.capacity_bytes) == (1, 2, 1000)
    assert mean.spread is not None
    spread = mean.spread["ttft_mean_s"]
    assert (spread.min, spread.max, spread.std) == (1, 3, 1)
    assert not {"requests", "workers", "capacity_bytes", "seed"} & set(mean.spread)


@pytest.mark.parametrize("first", [0, 1])
def test_a_mean_covers_the_runs_that_have_the_figure(first: int) -> None:
    seeds = [row(*REQUESTS[first : first + 1]), row(*REQUESTS[1 - first : 2 - first])]
    mean = mean_row(seeds)
    assert mean.tpot_mean_ms == pytest.approx(200)
    assert mean.spread is not None and mean.spread["tpot_mean_ms"].std == 0
    assert (mean.hit_rate_before, "hit_rate_before" in mean.spread) == (None, False)


TRACE = make_trace("a<b", BLOCK, [TraceEntry(0, 25, 2, (1, 2)), TraceEntry(1, 25, 2, (1, 2))], 1.0)


@pytest.fixture
def rows() -> list[Row]:
    """Make the rows of one policy on a pool with two seeds, which the report leaves out, and their
    mean; and of another policy on split DRAM that served nothing.
    """
    first = row(*REQUESTS[:1], seed=0)
    two = row(*REQUESTS[1:2], seed=1)
    none = dataclasses.replace(
        row(memory="split"), policy="<none>", seed=None, ttft_mean_s=None, hit_rate=0.125
    )
    return [first, two, mean_row([first, two]), none]


def html(options: Options, rows: list[Row], **origin: str) -> str:
    return make_report(TRACE, options, rows, origin).decode()


def cards(source: str) -> dict[str, tuple[str, ...]]:
    matches = re.findall(
        r"<div><dt>(.*?)</dt><dd>(.*?)</dd>(?:<dd class=\"than\">(.*?)</dd>)?", source
    )
    return {name: (value, than) for name, value, than in matches}


def test_the_cards_have_the_figures_of_the_row(rows: list[Row]) -> None:
    mean = rows[2]
    read = Page(html(Options(workers=2), rows))
    shown = cards(read.source)
    assert shown["Mean time to first token"][0] == seconds(mean.ttft_mean_s or 0)
    assert shown["90th percentile of it"][0] == seconds(mean.ttft_p90_s or 0)
    assert shown["Prompt blocks found"][0] == percent(mean.hit_rate)
    assert shown["Prompt tokens not computed"] == ("20", "of 50")
    assert shown["GPU time saved"][0] == f"{plain(mean.prefill_saved_s)} GPU-s"
    assert shown["Requests refused"][0] == "1"
    assert read.texts["p"][0] == (
        "With a shared pool 2 engines begin to answer after 2\xa0s on average at this load."
    )


def test_saved_prefill_is_the_time_of_the_hit_tokens() -> None:
    result = row(*REQUESTS[:1])
    costs = Options().model
    assert result.tokens_saved == 20
    assert result.prefill_saved_s == pytest.approx(
        (costs.prefill_ms(25) - costs.prefill_ms(5, 20)) / 1e3
    )


def test_an_empty_report_is_marked_as_empty() -> None:
    read = Page(html(Options(), []))
    assert read.texts["p"][0] == "No request was served."
    assert "svg" not in read.count


def test_names_in_a_page_are_escaped(rows: list[Row]) -> None:
    read = Page(html(Options(workers=2), rows, Command="simulate '<b>'"))
    assert "a<b at 1x: 2 workers, qwen3-32b-h200, chunked engines" in read.texts["h1"]
    assert "<none>" in read.texts["td"]
    assert "simulate '<b>'" in read.texts["dd"]


def test_a_page_describes_the_simulation(rows: list[Row]) -> None:
    options = Options(
        workers=2, hbm=80 * 10**9, pool=3 * 10**12, local=500 * 10**9, bandwidth=7e9, speed=2.0
    )
    text = " ".join(Page(html(options, rows)).texts["dd"])
    assert "a<b: 2 requests in 1 s, 50 prompt tokens, 10 tokens a block" in text
    assert "an unlimited cache would hit 33.3 %" in text
    assert "80 GB of HBM" in text and "3.00 TB" in text and "11 devices" in text
    assert "500 GB of each worker's own DRAM at 50 GB/s" in text


def test_unequal_memories_and_queues_cause_warnings(rows: list[Row]) -> None:
    late = dataclasses.replace(rows[2], ttft_p99_s=120.0)
    source = html(Options(workers=2, pool=1 << 40, local=1 << 30), [late])
    warned = " ".join(re.findall(r'<p class="warn" role="note">(.*?)</p>', source))
    assert "Saturated: in 1 of 1 runs" in warned and "2 min" in warned
    assert "The two memories are not equal" in warned
    assert "cannot keep up" in Page(source).texts["p"][0]
    assert 'class="warn" role' not in html(Options(workers=2), rows)


@pytest.mark.parametrize(
    ("pool_s", "split_s", "message"),
    [
        (1.0, 3.0, "begin to answer after 1 s instead of 3 s at this load."),
        (1.0, 1.02, "A shared pool makes no difference here"),
        (3.0, 1.0, "A shared pool does not help here"),
    ],
)
def test_the_headline_names_the_better_memory(
    rows: list[Row], pool_s: float, split_s: float, message: str
) -> None:
    pool = dataclasses.replace(rows[2], ttft_mean_s=pool_s)
    split = dataclasses.replace(rows[2], memory="split", ttft_mean_s=split_s)
    assert message in Page(html(Options(workers=2), [pool, split])).texts["p"][0].replace(
        "\xa0", " "
    )


def test_the_pool_is_compared_with_the_best_of_split_dram(rows: list[Row]) -> None:
    mean = rows[2]
    listed = [
        dataclasses.replace(mean, policy="least-cost", ttft_mean_s=2.0),
        dataclasses.replace(mean, policy="random", ttft_mean_s=1.0),
        dataclasses.replace(mean, policy="random", memory="split", ttft_mean_s=9.0),
        dataclasses.replace(mean, policy="linear", memory="split", ttft_mean_s=4.0),
    ]
    chosen = summarize(listed, 5.0)
    assert (chosen.pool, chosen.split) == (listed[0], listed[3])


def test_of_several_loads_the_highest_within_the_objective_is_shown(rows: list[Row]) -> None:
    loads = [
        dataclasses.replace(rows[2], speed=speed, ttft_p90_s=p90)
        for speed, p90 in ((1.0, 2.0), (2.0, 4.0), (3.0, 8.0))
    ]
    assert summarize(loads, 5.0).speed == 2.0
    assert summarize(loads, 1.0).speed == 1.0
    assert sustained_load(loads, "pool", "random", 5.0) == pytest.approx(2.25)
    source = html(Options(workers=2), loads)
    # The trace has two requests in one second; its own speed is 2 requests per second.
    assert cards(source)["Load within the objective"] == ("4.5/s", "p90 within 5 s")
    assert "at 2x: 2 workers" in Page(source).texts["h1"][0]
    assert "Requests served" in Page(source).texts["figcaption"]


def test_the_time_series_adds_up_to_the_row() -> None:
    trace = make_trace("t", BLOCK, [TraceEntry(at / 4, 25, 20, (1, 2)) for at in range(40)], 1.0)
    results = simulate(trace, Options(workers=1), policies=["random"], memories=["pool"],
                     courses=True)  # fmt: skip
    course = results[0].course
    assert course is not None and results[1].course == course
    step = course.end_s[0]
    # Little's law: the mean number of waiting requests is the arrival rate times the mean wait.
    assert sum(course.waiting) * step == pytest.approx(40 * (results[0].ttft_mean_s or 0))
    assert course.hit_rate[0] == 0 or course.hit_rate[0] is None or course.hit_rate[0] < 1
    assert None in course.ttft_mean_s  # after the last arrival
    assert simulate(trace, Options(workers=1), policies=["random"])[0].course is None
