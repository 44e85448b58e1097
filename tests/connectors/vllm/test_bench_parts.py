# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The parts of the vLLM benchmark without vLLM: requests, arrivals, sums, verdict, charts."""

from __future__ import annotations

import copy
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from beluga_bench.vllm.charts import draw
from beluga_bench.vllm.dataset import Dataset, cut, datasets_of, pool_tokens, warm_up_of
from beluga_bench.vllm.likeness import agreed, faults, identical, loaded_tokens, warnings
from beluga_bench.vllm.stream import stream
from beluga_bench.vllm.summary import arrivals, summary
from beluga_bench.vllm.tables import print_tables
from beluga_bench.vllm.tiers import medians_of, ratios, whole
from beluga_bench.vllm.verdict import verdict

BLOCK = 128


def blocks(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Return each whole block of each prompt with its prefix, which together identify a block."""
    return [tuple(tokens[:end]) for tokens in prompts for end in range(BLOCK, len(tokens), BLOCK)]


@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192])
def test_three_in_ten_blocks_repeat_an_earlier_one(length: int) -> None:
    (dataset,) = datasets_of([length], BLOCK, seed=3)
    block_tokens = blocks(dataset.prompts)
    fresh = len(set(block_tokens))
    assert len(block_tokens) * BLOCK == dataset.full_tokens
    assert fresh * BLOCK == dataset.fresh_tokens
    assert 0.2 < 1 - fresh / len(block_tokens) < 0.4
    assert all(len(tokens) == dataset.length for tokens in dataset.prompts)


def test_prompts_of_different_lengths_share_nothing_and_fit_a_pool() -> None:
    short, long = datasets_of([2048, 1024], BLOCK, seed=3)
    assert (short.length, long.length) == (1025, 2049)
    assert not set(blocks(short.prompts)) & set(blocks(long.prompts))
    assert pool_tokens([short, long]) > short.fresh_tokens + long.fresh_tokens


def test_a_set_repeats_by_its_seed_and_in_any_order() -> None:
    first, other = (Dataset(1025, 2, 3, BLOCK, seed) for seed in (1, 2))
    assert first.prompts == Dataset(1025, 2, 3, BLOCK, 1).prompts
    assert not set(blocks(first.prompts)) & set(blocks(other.prompts))
    assert sorted(first.shuffled(5)) == sorted(first.prompts)


def test_a_warm_up_exceeds_the_engines_cache_and_is_not_measured() -> None:
    datasets = datasets_of([1024, 4096], BLOCK, seed=3)
    warm_up = warm_up_of(datasets)
    assert sum(map(len, warm_up.prompts)) > 2.5 * (4097 + 3 * BLOCK)
    assert not set(blocks(warm_up.prompts)) & set(blocks(datasets[0].prompts))


def test_a_single_question_has_no_repetition() -> None:
    assert Dataset(1025, 2, 1, BLOCK, 1).repeated_tokens == 0


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


def test_a_stream_answers_every_request_in_its_place() -> None:
    machine = Machine()
    reply = stream(machine, [3] * 9, [[number] for number in range(9)], None, 2)
    assert [output["tokens"] for output in reply["outputs"]] == [[n] * 3 for n in range(9)]
    assert machine.added_max == 2
    for output in reply["outputs"]:
        assert sum(output["gaps_s"]) == pytest.approx(2 * output["tpot_s"])
        assert len(output["gaps_s"]) == 2
    assert all(0 <= output["ttft_s"] <= reply["elapsed_s"] for output in reply["outputs"])


def test_requests_wait_from_when_they_are_due() -> None:
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


def test_a_run_with_only_hits_passes(report: dict[str, Any]) -> None:
    assert report["verdict"]["passed"]
    assert report["verdict"]["full_hits"] == {"beluga": True}


@pytest.mark.parametrize(
    ("part", "index", "field", "value"),
    [
        ("passes", -1, "cached_tokens", 4095),
        ("rates", -1, "cached_tokens", 0),
        ("passes", 0, "output_tokens", 63),
        ("rates", 0, "requests", 3),
        ("variants", 1, "hit_tokens", 992),
        ("variants", 0, "outputs_identical", False),
    ],
)
def test_a_run_with_a_miss_fails(
    report: dict[str, Any], part: str, index: int, field: str, value: object
) -> None:
    changed = copy.deepcopy(report)
    changed[part][index][field] = value
    assert not verdict(changed["passes"], changed["rates"], changed["variants"])["passed"]


def test_tables_name_every_arm_and_what_was_skipped(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    print_tables(report)
    printed = capsys.readouterr().out
    names = chain(("plain", "beluga", "blocks-32"), ("no such package", "beluga yes"))
    assert [name for name in names if name not in printed] == []


def test_charts_are_drawn(report: dict[str, Any], tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "change", [{"identical": None}, {"cached_tokens": 128}, {"bytes_from_below": 1000}], ids=str
)
def test_a_prompt_of_another_source_fails_the_comparison(change: dict[str, Any]) -> None:
    good = tier_row("beluga-disk", 0, 0.2)
    assert whole([good], 256, 1 << 20)
    assert not whole([good, good | change], 256, 1 << 20)


WHOLE, BLOCK = 3840, 128


def reply(logprob: float, cached: int = WHOLE, failed: int = 0) -> dict[str, Any]:
    figures = {"load_failed_blocks": float(failed)}
    return {
        "tokens": [7],
        "logprobs": {"7": logprob},
        "cached_tokens": cached,
        "figures": figures,
    }


# these are rounded differently in bfloat16
COMPUTED, LOCAL = reply(-3.5174, cached=0), reply(-3.5481)


@pytest.mark.parametrize(
    ("hit", "is_like"),
    [
        (reply(-3.5481), True),
        # the answer equals a computed one, but all blocks count as loaded
        (reply(-3.5174), False),
        (reply(-3.5174, cached=0), True),  # a miss was computed like the first time
        (reply(-3.5481, cached=0), False),
        (reply(-3.5174, failed=30), True),  # announced but not loaded, and so computed
        (reply(-3.5481, failed=30), False),
        (reply(-3.5481, cached=1280), None),
        (reply(-3.5174, failed=7), None),
    ],
)
def test_a_hit_is_compared_with_an_answer_of_the_same_steps(
    hit: dict[str, Any], is_like: bool | None
) -> None:
    hit_tokens = loaded_tokens(hit, BLOCK)
    assert identical(hit, loaded=hit_tokens, whole=WHOLE, miss=COMPUTED, local=LOCAL) is is_like


def test_a_partial_hit_is_not_compared() -> None:
    assert agreed([True, None])
    assert not agreed([True, False, None])
    assert not agreed([None])


def test_only_fields_that_explain_a_miss_are_listed() -> None:
    saving = {"save_failures": 1.0, "save_skipped_blocks": 30.0, "save_s": 0.9, "mismatches": 0.0}
    assert faults(saving, {"lookup_failures": 1.0, "load_bytes": 5.0}) == {
        "lookup_failures": 1,
        "save_failures": 1,
        "save_skipped_blocks": 30,
    }
    assert faults({}) == {}


def test_the_connectors_warnings_are_found_in_a_log() -> None:
    line = "beluga saves: saving blocks: the server did not answer in time (after 612 ms)"
    log = f"WARNING 11-22 06:38:31 [link.py:230] {line}\nINFO beluga: blocks of 128 tokens\nWARNING"
    assert warnings(log) == [line]
