# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The loads of workers: what the router sent them, compared with naive models, and what engines
report in their metrics.
"""

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beluga.errors import NoWorkersError, RouterError
from beluga.router import (
    Load,
    LoadReport,
    LoadTracker,
    Overlap,
    Query,
    Worker,
    WorkerMetrics,
    read_load,
)
from beluga.router.tracker import alone


def held(counts: Counter[int], blocks: list[int]) -> int:
    return next((at for at, block in enumerate(blocks) if not counts[block]), len(blocks))


def held_alone(counts: Counter[int], blocks: list[int]) -> float:
    """Return the sum over the leading blocks that others hold, starting with the last."""
    total = 0.0
    for holders in range(1, 5):  # as C adds them up
        alike = [block for block in blocks[: held(counts, blocks)] if counts[block] == holders]
        total += len(alike) * alone(holders)
    return total


def query_of(blocks: list[int]) -> Query:
    return Query(16 * len(blocks), 16, blocks, blocks)


@pytest.mark.parametrize("seed", range(20))
def test_the_blocks_of_workers_match_a_model(seed: int) -> None:
    chance = random.Random(seed)
    prompts: list[list[int]] = [[]]
    for number in range(40):  # each one continues a prefix of another one
        start = chance.choice(prompts)
        start = start[: chance.randint(0, len(start))]
        prompts.append([*start, *(number << 32 | at for at in range(chance.randint(0, 30)))])
    workers = [Worker(number) for number in range(3)]
    tracker = LoadTracker(workers)
    counts: list[Counter[int]] = [Counter() for _ in workers]
    running: list[tuple[int, int, list[int]]] = []
    for request in range(300):
        if running and chance.random() < 0.45:
            ended, at, blocks = running.pop(chance.randrange(len(running)))
            tracker.free(ended)
            counts[at].subtract(blocks)
        else:
            at, blocks = chance.randrange(len(workers)), chance.choice(prompts)
            running.append((request, at, blocks))
            tracker.add(request, workers[at], query_of(blocks), Overlap())
            counts[at].update(blocks)
        prompt = chance.choice(prompts)
        states = tracker.states(workers, prompt)
        for state, count in zip(states, counts, strict=True):
            assert state.load.active_decode_blocks == len(+count)
            assert state.new_blocks == len(prompt) - held(count, prompt)
            assert state.held_alone == held_alone(count, prompt)


def test_blocks_with_colliding_slots_are_found_and_removed() -> None:
    """Each request holds one block, which is a hit until the request ends."""
    worker = Worker(0)
    tracker = LoadTracker([worker])
    for block in range(5000):
        tracker.add(block, worker, query_of([block]), Overlap())
    for block in range(0, 5000, 2):
        tracker.free(block)
    assert tracker.load(worker).active_decode_blocks == 2500
    for block in range(5000):
        assert tracker.new_blocks(worker, [block]) == (block + 1) % 2


A, B = Worker(1), Worker(2)
NOTHING = Overlap()


def account(requests: int, prefill: int, blocks: int, outstanding: int) -> Load:
    """Make a load without published metrics."""
    return Load(
        active_requests=requests,
        active_prefill_tokens=prefill,
        active_decode_blocks=blocks,
        outstanding_tokens=outstanding,
    )


def query(*sequence: int, isl: int = 0) -> Query:
    return Query(isl=isl or 16 * len(sequence), block_size=16, sequence=sequence)


def test_a_request_is_added_prefilled_and_freed() -> None:
    tracker = LoadTracker([A, B])
    tracker.add("x", A, query(1, 2, 3, isl=50), Overlap(device=1, shared=1))
    assert tracker.load(A) == account(1, 50 - 32, 3, 50)
    assert tracker.load(B) == Load()
    assert tracker.prefill_done("x")
    assert not tracker.prefill_done("x")
    assert tracker.load(A) == account(1, 0, 3, 0)
    assert tracker.free("x")
    assert not tracker.free("x")
    assert tracker.load(A) == Load()


def test_output_blocks_are_added_and_weighted_down() -> None:
    tracker = LoadTracker([A])
    tracker.add("plain", A, query(1, 2), NOTHING)
    assert tracker.output("plain", 16)
    assert tracker.load(A).active_decode_blocks == 3
    tracker.free("plain")
    tracker.add("fading", A, query(1, 2, 3, 4), NOTHING, expected_output=64)
    tracker.add("other", A, query(1, 2), NOTHING)
    tracker.output("fading", 32)  # blocks 3, 4 and the block of the output count one half each
    assert tracker.load(A).active_decode_blocks == round(2 + 3 * 0.5)
    tracker.output("fading", 640)
    assert tracker.load(A).active_decode_blocks == 2
    tracker.add("third", A, query(1, 2, 3, 4), NOTHING)  # the blocks are no longer exclusive
    assert tracker.load(A).active_decode_blocks == 4
    for request in ("fading", "other", "third"):
        tracker.free(request)
    assert tracker.load(A) == Load()
    assert not tracker.output("fading", 700)


def test_duplicate_names_and_unknown_workers_are_rejected() -> None:
    tracker = LoadTracker([A])
    tracker.add("x", A, query(1), NOTHING)
    with pytest.raises(ValueError, match="'x'"):
        tracker.add("x", A, query(1), NOTHING)
    with pytest.raises(NoWorkersError, match="add it first"):
        tracker.add("y", B, query(1), NOTHING)
    assert tracker.load(A).active_requests == 1
    assert not tracker.free("y")


def test_prefills_progress_at_the_rate_of_the_oldest() -> None:
    tracker = LoadTracker([A])
    tracker.add("first", A, query(isl=100), NOTHING, now=10, prefill_s=2.0)
    tracker.add("second", A, query(isl=50), NOTHING, now=11, prefill_s=1.0)
    tracker.refresh(11)
    assert tracker.load(A).active_prefill_tokens == 150 - 50
    tracker.refresh(12.5)  # the first prefill is late, and the second one has also made progress
    assert tracker.load(A).active_prefill_tokens == 150 - 125
    tracker.refresh(90)
    assert tracker.load(A).active_prefill_tokens == 0
    tracker.prefill_done("first", 12.5)
    assert tracker.load(A).active_prefill_tokens == 50
    tracker.refresh(13)
    assert tracker.load(A).active_prefill_tokens == 25


def test_the_expected_delay_of_a_late_prefill_doubles() -> None:
    tracker = LoadTracker([A])
    tracker.add("first", A, query(isl=100), NOTHING, now=10, prefill_s=2.0)
    tracker.add("second", A, query(isl=50), NOTHING, now=10, prefill_s=1.0)
    assert tracker.load(A).prefill_s == 3.0
    tracker.refresh(11.5)
    assert tracker.load(A).prefill_s == 1.5
    tracker.refresh(20)  # the first one should have ended 8 s ago: HBM may be full
    assert tracker.load(A).prefill_s == 1.0 + 8.0
    tracker.prefill_done("first", 20)
    assert tracker.load(A).prefill_s == 1.0
    tracker.free("second", 20.5)
    assert tracker.load(A).prefill_s == 0.0


def test_the_typical_request_is_the_mean_of_sent_requests() -> None:
    tracker = LoadTracker([A])
    size = query().block_size
    tracker.add("first", A, query(isl=size), Overlap(device=1), now=0)
    tracker.add("second", A, query(isl=3 * size), NOTHING, now=0)
    assert (tracker.usual.blocks, tracker.usual.on_device) == (2.0, 0.5)
    tracker.prefill_done("first", 1.0)
    tracker.free("first", 5.0)
    tracker.free(
        "second", 50.0
    )  # ended before the first token: not counted in the length of answers
    assert (tracker.usual.ended, tracker.usual.decode_s) == (1, 4.0)


def test_the_growth_of_a_workers_blocks_is_estimated_from_ended_requests() -> None:
    tracker = LoadTracker([A])
    tracker.add("first", A, query(1, 2), NOTHING)  # 2 blocks are held now
    tracker.add("second", A, query(1, 2, 3, 4, 5), NOTHING)  # and now 5
    tracker.prefill_done("first", 1.0)
    tracker.free("first", 2.0)
    assert tracker.usual.change == 3**2
    tracker.publish(A, WorkerMetrics(kv_active_blocks=12, kv_total_blocks=100))
    tracker.prefill_done("second", 3.0)
    tracker.free("second", 4.0)
    assert tracker.usual.change == (3**2 + 7**2) / 2


def simulated_alone(holders: int, chance: random.Random) -> float:
    """Return the mean fraction of its time in which a request is the only holder of a block, from
    20,000 runs: ``holders`` others hold it first, and as many arrive per mean run time of a
    request.
    """
    total = 0.0
    for _ in range(20_000):
        mine = chance.expovariate(1.0)
        ends = [(0.0, chance.expovariate(1.0)) for _ in range(holders)]
        now = 0.0
        while holders and (now := now + chance.expovariate(holders)) < mine:
            ends.append((now, now + chance.expovariate(1.0)))
        last = 0.0  # the times until which others hold the block
        for start, end in ends:
            total += max(start - last, 0.0)
            last = max(last, end)
        total += max(mine - last, 0.0)
    return total / 20_000


def test_the_share_of_exclusive_block_time_is_measured() -> None:
    assert alone(0) == 1.0
    chance = random.Random(1)
    for holders in (1, 2, 3, 5):
        assert alone(holders) == pytest.approx(simulated_alone(holders, chance), abs=0.012)


def test_exclusive_blocks_of_a_new_request_are_counted() -> None:
    tracker = LoadTracker([A])
    tracker.add("first", A, query(1, 2, 3), NOTHING)
    tracker.add("second", A, query(1, 2, 4), NOTHING)
    [state] = tracker.states([A], (1, 2, 3, 5))
    assert state.new_blocks == 1
    assert state.held_alone == pytest.approx(2 * alone(2) + alone(1))
    for request in range(20):
        tracker.add(request, A, query(1, 2, 3), NOTHING)
    [state] = tracker.states([A], (1, 2, 4))
    assert state.held_alone == pytest.approx(alone(1))  # no block with many holders


# ---- What engines report

# vLLM 0.11 with two data-parallel engines behind one port.
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m, {a}"} 3.0
vllm:num_requests_running{engine="1",model_name="m, {a}"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m, {a}"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m, {a}"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m, {a}"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m, {a}"} 0.25
vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="128",engine="1",num_gpu_blocks="60"} 1.0
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_hits_total{engine="0"} 20.0
vllm:external_prefix_cache_hits_total{engine="0"} 5.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0
"""

_AT = 'engine_type="unified",model_name="q",moe_ep_rank="0",pp_rank="0"'
# SGLang 0.5.11 with --dp 2 --enable-dp-attention --tp 4 --enable-metrics-for-all-schedulers and
# --enable-priority-scheduling: four schedulers report the load of two ranks, and parts of it by
# priority.
SGLANG = "# TYPE sglang:num_running_reqs gauge\n" + "".join(
    f'sglang:num_running_reqs{{dp_rank="{dp}",{_AT},priority="",tp_rank="{tp}"}} {3 + dp}.0\n'
    f'sglang:num_running_reqs{{dp_rank="{dp}",{_AT},priority="7",tp_rank="{tp}"}} 2.0\n'
    f'sglang:num_queue_reqs{{dp_rank="{dp}",{_AT},priority="",tp_rank="{tp}"}} {2 * dp}.0\n'
    f'sglang:token_usage{{dp_rank="{dp}",{_AT},priority="",tp_rank="{tp}"}} {0.5 + 0.25 * dp}\n'
    f'sglang:num_pages{{dp_rank="{dp}",{_AT},priority="",tp_rank="{tp}"}} 400.0\n'
    f'sglang:page_size{{dp_rank="{dp}",{_AT},priority="",tp_rank="{tp}"}} 64.0\n'
    f'sglang:fwd_occupancy{{dp_rank="{dp}",{_AT},priority="",tp_rank="{tp}"}} NaN\n'
    for dp, tp in ((0, 0), (0, 1), (1, 2), (1, 3))
)
SGLANG += (
    'sglang:prompt_tokens_total{model_name="q"} 4000.0\n'
    'sglang:cached_tokens_total{cache_source="device",model_name="q"} 700.0\n'
    'sglang:cached_tokens_total{cache_source="host",model_name="q"} 300.0\n'
)

# SGLang 0.5.10, where labels have the size of the cache.
SGLANG_OLD = (
    'sglang:cache_config_info{model_name="q",num_pages="500",page_size="32",tp_rank="0"} 1.0\n'
    'sglang:num_running_reqs{engine_type="unified",model_name="q",pp_rank="0",tp_rank="0"} 2.0\n'
    'sglang:num_queue_reqs{engine_type="unified",model_name="q",pp_rank="0",tp_rank="0"} 1.0\n'
    'sglang:token_usage{engine_type="unified",model_name="q",pp_rank="0",tp_rank="0"} 0.1\n'
)


def iteration(number: int, rank: int = 0, **more: int) -> dict[str, object]:
    """Return an iteration of TensorRT-LLM 1.x (main, 2026). The row of the second rank is a copy of
    the first one's, except for its own batch.
    """
    return {
        "attentionDpRank": rank,
        "gpuMemUsage": 76665782272,
        "iter": number,
        "iterLatencyMS": 7.0,
        "inflightBatchingStats": {
            "numContextRequests": 1,
            "numGenRequests": 2 + rank,
            "numPausedRequests": 1,
            "numScheduledRequests": 3 + rank,
        },
        "kvCacheStats": {
            "allocNewBlocks": 3126,
            "cacheHitRate": 0.25,
            "freeNumBlocks": 300,
            "maxNumBlocks": 400,
            "missedBlocks": 30,
            "reusedBlocks": 10,
            "tokensPerBlock": 32,
            "usedNumBlocks": 100,
        },
        "maxNumActiveRequests": 2048,
        "numActiveRequests": 4,
        "numQueuedRequests": 0 if rank else 6,
        "specDecodingStats": None,
        **more,
    }


TRT = json.dumps([iteration(153, numActiveRequests=99), iteration(154)])
TRT_RANKS = json.dumps([iteration(n, rank) for n in (7, 8) for rank in (0, 1)])


@pytest.mark.parametrize(
    ("answer", "report"),
    [
        (VLLM, LoadReport("vLLM", WorkerMetrics(4, 0, 60, 160, 7, 0.375, 0.25), 128, ranks=2)),
        (SGLANG, LoadReport("SGLang", WorkerMetrics(7, 0, 500, 800, 2, 0.625, 0.25), 64, ranks=2)),
        (SGLANG_OLD, LoadReport("SGLang", WorkerMetrics(2, 0, 50, 500, 1, 0.1, 0.0), 32)),
        (TRT, LoadReport("TensorRT-LLM", WorkerMetrics(4, 2048, 100, 400, 6, 0.25, 0.25), 32)),
        (
            TRT_RANKS,
            LoadReport("TensorRT-LLM", WorkerMetrics(9, 4096, 200, 800, 6, 0.25, 0.25), 32),
        ),
        ("[]", LoadReport("TensorRT-LLM", None)),
        (
            "vllm:num_requests_running 2\nvllm:gpu_cache_usage_perc 0.5 1700000000000\n",
            LoadReport("vLLM", WorkerMetrics(2, 0, 0, 0, 0, 0.5, 0.0)),
        ),
        # vLLM before it has determined its cache size, and a counter that was reset
        (
            "vllm:num_requests_running 0\n"
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n'
            "vllm:prefix_cache_queries_total 1\nvllm:prefix_cache_hits_total 2\n",
            LoadReport("vLLM", WorkerMetrics(0, 0, 0, 0, 0, 0.0, 1.0), 16),
        ),
        # no page table, and iterations of images
        (
            '[{"numActiveRequests": 1, "kvCacheStats": null}]',
            LoadReport("TensorRT-LLM", WorkerMetrics(1)),
        ),
    ],
    ids=[
        *("vLLM 0.11", "SGLang 0.5.11", "SGLang 0.5.10", "TensorRT-LLM 1.x", "its ranks"),
        *("idle", "vLLM V0", "vLLM starts", "no cache"),
    ],
)
def test_engines_are_recognized_and_read(answer: str, report: LoadReport) -> None:
    assert read_load(answer) == report


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (
            "".join(f'vllm:num_requests_running{{engine="{n}"}} 1e15\n' for n in range(9300)),
            "vllm:num_requests_running",
        ),
        (
            "sglang:num_running_reqs 1\n"
            + "".join(f'sglang:num_pages{{dp_rank="{n}"}} 1e15\n' for n in range(2)),
            "sglang:num_pages",
        ),
        (
            json.dumps([iteration(1, rank, numQueuedRequests=10**15) for rank in range(2)]),
            "numQueuedRequests",
        ),
    ],
    ids=["vLLM", "SGLang", "TensorRT-LLM"],
)
def test_figures_whose_sum_is_no_count_are_refused(answer: str, name: str) -> None:
    """A sum beyond 64 bits could not be stored, and the check of the engine's health ended."""
    with pytest.raises(RouterError, match=f"the sum of {name} is"):
        read_load(answer)


def test_the_connector_reports_the_space_of_its_blocks() -> None:
    metrics = 'beluga_vllm_space_info{engine="0",model_name="m",space="fedcba9876543210"} 1.0\n'
    report = read_load(VLLM + metrics)
    assert report is not None and report.space == 0xFEDCBA9876543210
    with pytest.raises(RouterError, match="space_info is 'xyz'"):
        read_load(VLLM + metrics.replace("fedcba9876543210", "xyz"))


def test_the_start_of_the_process_is_read_if_it_is_there() -> None:
    for more, started_s in (("", None), ("process_start_time_seconds 1.7e+09\n", 1.7e9)):
        report = read_load(VLLM + more)
        assert report is not None and report.started_s == started_s


@pytest.mark.parametrize("answer", ["", "up 1\nvllm:num_requests_waiting 1\n", "<html>", "{}"])
def test_a_page_without_figures_returns_none(answer: str) -> None:
    assert read_load(answer) is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("vllm:num_requests_running NaN\n", "vllm:num_requests_running is 'NaN'"),
        ("sglang:num_running_reqs many\n", "sglang:num_running_reqs is 'many'"),
        ("sglang:num_running_reqs -1\n", "is '-1'"),
        ("vllm:num_requests_running 1e300\n", "is '1e300'"),
        ("vllm:num_requests_running\n", "a malformed sample"),
        ('vllm:num_requests_running{a="b} 1\n', "a malformed sample"),
        ("[", "the metrics are not JSON"),
        ("[" * 100_000, "the metrics are not JSON"),
        ("[1]", "not an iteration of TensorRT-LLM: 1"),
        ('[{"iter": 1}]', "not an iteration"),
        ('[{"numActiveRequests": "1"}]', "numActiveRequests is '1'"),
        ('[{"numActiveRequests": true}]', "numActiveRequests is True"),
        ('[{"numActiveRequests": 1%s}]' % ("0" * 4000), "numActiveRequests is 1000"),
        ('[{"numActiveRequests": 1, "kvCacheStats": [1]}]', "has no valid maxNumBlocks"),
    ],
)
def test_unreadable_metrics_are_reported(answer: str, why: str) -> None:
    with pytest.raises(RouterError) as raised:
        read_load(answer)
    assert why in str(raised.value)
    assert len(str(raised.value)) < 160


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([VLLM, SGLANG, SGLANG_OLD, TRT, TRT_RANKS]),
    st.integers(0, 10_000),
    st.integers(0, 30),
    st.text('0{}[]",\n e-NaN\\=', max_size=8),
)
def test_damaged_pages_return_figures_none_or_one_error(
    answer: str, at: int, removed: int, put: str
) -> None:
    at %= len(answer)
    try:
        report = read_load(answer[:at] + put + answer[at + removed :])
    except RouterError:
        return
    if report is not None and report.metrics is not None:
        metrics = report.metrics
        assert (
            0 <= metrics.gpu_cache_usage_perc <= 1 and 0 <= metrics.gpu_prefix_cache_hit_rate <= 1
        )
        assert min(metrics.request_active_slots, metrics.kv_active_blocks, report.block_size) >= 0
