# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The studies by simulation: families of policies, hints, what a lower tier admits, and the
comparison of all policies with its verdict, goodput and page.
"""

from itertools import combinations
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from beluga_bench.harness.recorded import read_record
from beluga_bench.studies import families, hints, policies, tiers_policy
from beluga_bench.studies.families import SHARES, Cell, family_trace, knee, summary, ttft_s
from beluga_bench.studies.hinted import LEVELS, HintedPool
from beluga_bench.studies.hints import NONE, Strategy, made_sessions, steps_of
from beluga_bench.studies.policies import BEGIN, END, check, check_goodput
from beluga_bench.studies.policies import Result as PolicyResult
from beluga_bench.studies.tiers_policy import (
    DEFAULT,
    Result,
    bound,
    compare,
    conversations,
    judge,
    shared_prompt,
    without_reuse,
)
from support.blocks import keys

from beluga._ffi import lib
from beluga.index import BlockState, IndexClient, IndexServer
from beluga.pool import Pool
from beluga.router import DEFAULT_POLICY, POLICIES
from beluga.rpc import Client
from beluga.simulate import (
    Options,
    Trace,
    TraceEntry,
    found_shares,
    goodput,
    load_trace,
    make_trace,
    simulate,
)
from beluga.tiers.admission import TRIAL

PAGE = 4096
CAPACITY = 60

TRACES = Path(__file__).resolve().parent.parent.parent.parent / "shared/traces"


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.uint32)


class Indexed:
    """A server's pool in which only that many pages are left for blocks."""

    def __init__(self, server: IndexServer, meta: IndexClient, capacity: int) -> None:
        self._meta = meta
        stat = server.index_stat()
        pages = stat.data_bytes // PAGE
        for number in range(pages - capacity):  # blocks that are pinned fill the rest
            self._stored(10_000 + number)
        names = keys(range(10_000, 10_000 + pages - capacity))
        self._pins = [
            meta.lookup(names[at : at + 256], pin=True) for at in range(0, len(names), 256)
        ]

    def _stored(self, *blocks: int) -> None:
        grants = self._meta.reserve(keys(blocks), length=PAGE)
        self._meta.commit([grant for grant in grants if grant.state is BlockState.GRANTED])

    def look_up(self, blocks: list[int]) -> int:
        return self._meta.lookup(keys(blocks)).count

    def put(self, blocks: list[int]) -> None:
        self._stored(*blocks)

    def has(self, block: int) -> bool:
        return bool(self._meta.tiers(keys([block]))[0] & 1)

    def hint(self, blocks: list[int], level: int) -> int:
        return self._meta.hint(keys(blocks), level=level)[0]


@pytest.fixture
def small(shm: Path) -> Pool:
    return Pool.create([shm / "a"], device_size=8 << 20, sparse=True, max_blocks=4096)


@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_pool_evicts_the_same_blocks_as_a_server(small: Pool, seed: int) -> None:
    chance = Random(seed)
    chains = [[100 * tree + depth for depth in range(chance.randint(1, 30))] for tree in range(12)]
    with (
        small,
        IndexServer(small, hint_budget=1.0) as server,
        Client(small) as client,
    ):
        real = Indexed(server, IndexClient(client), CAPACITY)
        made = HintedPool(2000, CAPACITY, CAPACITY)
        for _ in range(150):
            chain = chance.choice(chains)
            act = chance.randrange(4)
            if act < 2:
                assert made.look_up(0, ids(*chain)) == real.look_up(chain)
                made.put(0, ids(*chain))
                real.put(chain)
            else:
                level = chance.choice(list(LEVELS.values()))
                part = chain[chance.randrange(len(chain)) :]
                assert made.hint(0, ids(*part), level) == real.hint(part, level)
            everything = [block for blocks in chains for block in blocks]
            assert list(map(made.has, everything)) == list(map(real.has, everything))


def test_hints_end_in_the_order_of_their_times() -> None:
    pool = HintedPool(20, 4, 4)
    pool.put(0, ids(0, 1, 2, 3))
    assert pool.hint(0, ids(0, 1), LEVELS["pin"], 100) == 2
    assert pool.hint(0, ids(2), LEVELS["high"], 50) == 1
    assert pool.look_up(60, ids(0)) == 1  # the block's time to live starts again
    pool.put(149, ids(10))
    assert [pool.has(number) for number in (0, 1, 2, 3)] == [True, False, True, True], "1, at 100"
    pool.put(150, ids(11))
    assert [pool.has(number) for number in (0, 2, 3)] == [True, False, True]
    pool.put(161, ids(12))
    assert [pool.has(number) for number in (0, 3)] == [False, True]


def test_a_hint_ends_with_its_block() -> None:
    pool = HintedPool(20, 2, 1)
    pool.put(0, ids(0, 1))
    assert pool.hint(0, ids(0), LEVELS["low"], 100) == 1
    pool.put(1, ids(2))
    assert not pool.has(0)
    pool.put(2, ids(0))
    pool.put(200, ids(3))
    assert (pool.has(0), pool.has(2)) == (True, False), "it went by age"


def test_a_budget_favors_the_leading_blocks() -> None:
    pool = HintedPool(1000, 800, 300)
    chain = np.arange(700, dtype=np.uint32)
    pool.put(0, chain)
    assert pool.hint(0, chain, LEVELS["high"]) == 300
    assert (pool.favored_max, pool.refused) == (300, 400)
    assert pool.hint(0, chain[:300], lib.BL_LEVEL_PINNED) == 300, "they are favored already"
    assert pool.hint(0, chain, LEVELS["low"]) == 700
    pool.hint(0, chain[400:], LEVELS["high"])
    assert (pool.favored_max, pool.refused) == (300, 400)


@pytest.fixture(scope="module")
def hints_made() -> tuple[object, ...]:
    return steps_of(made_sessions())


def test_without_hints_a_pool_nearly_matches_simulated_lru(hints_made: tuple[object, ...]) -> None:
    """A server's pool has used what was found before it stores the rest, and evicts it first."""
    steps, trace = hints_made
    for share in (0.3, 0.6):  # the longest prompt fits
        hit, favored, refused = hints.run(steps, trace, share)
        best = found_shares(trace, [int(share * trace.id_count)])[0]
        assert best - 0.02 < hit <= best
        assert (favored, refused) == (0, 0)


@pytest.mark.parametrize(
    "strategy",
    [NONE, Strategy(60.0), Strategy(600.0, left=True, end=True), Strategy(end=True, turn=True)],
    ids=str,
)
def test_no_strategy_exceeds_the_bound_or_its_budget(
    hints_made: tuple[object, ...], strategy: Strategy
) -> None:
    steps, trace = hints_made
    for budget in (0.0, 0.25, 0.9):
        hit, favored, _ = hints.run(steps, trace, 0.2, budget=budget, strategy=strategy)
        assert 0 < hit <= bound(trace, int(0.2 * trace.id_count))
        assert favored <= budget


def test_a_session_that_releases_blocks_at_its_end_frees_space() -> None:
    waits, ends, begins = made_sessions(3, 2)
    for session, times in (waits, (0, 100)), (ends, (40, 50)), (begins, (60, 70)):
        for request, at_s in zip(session, times, strict=True):
            request.t, request.hash_ids = at_s, list(range(20))
    steps, trace = steps_of([waits, ends, begins])
    assert hints.run(steps, trace, 0.8)[0] == 48 / 120
    assert hints.run(steps, trace, 0.8, strategy=Strategy(end=True))[0] == 60 / 120


def test_the_smoke_run_writes_its_rows(tmp_path: Path) -> None:
    hints.main("--smoke", str(tmp_path / "out.json"))
    report = read_record(tmp_path / "out.json")
    assert report["what"] == "simulated"
    rows = report["rows"]
    assert [row["policy"] for row in rows][:2] == ["lru", "left"]
    assert rows[-1]["policy"] == "belady"
    assert max(row["hit"] for row in rows) == rows[-1]["hit"]


def test_a_family_is_reproducible_and_its_seeds_differ() -> None:
    first, again, other = family_trace(3, 0, 200), family_trace(3, 0, 200), family_trace(3, 1, 200)
    assert list(first.ids) == list(again.ids)
    assert list(first.arrival_s) == list(again.arrival_s)
    assert list(first.output_tokens) != list(other.output_tokens)
    kinds = {tuple(family_trace(number, 0, 50).count) for number in range(20)}
    assert len(kinds) == 20


@pytest.mark.parametrize("family", range(12))
def test_every_prompt_fits_a_worker(family: int) -> None:
    trace = family_trace(family, 0, 500)
    assert len(trace.arrival_s) == 500
    assert list(trace.arrival_s) == sorted(trace.arrival_s)
    hbm = Options().hbm_bytes // (trace.block_tokens * Options().model.kv_bytes_per_token)
    for tokens, output, count in zip(
        trace.input_tokens, trace.output_tokens, trace.count, strict=True
    ):
        assert tokens // trace.block_tokens == count
        assert tokens + output < hbm * trace.block_tokens


@pytest.mark.long
def test_at_the_knee_requests_wait() -> None:
    trace = family_trace(1, 0, 400)
    at_knee, policies = knee(trace), ("linear", "lmetric", "min-ttft", "least-cost")

    def best(load: float) -> float:
        return min(ttft_s(trace, load, policy) for policy in policies)

    assert best(at_knee) >= 4 * best(0.01) > best(at_knee / 1.06)


def made(family: int, share: float, *, saturated: bool = False, **ttft_s: list[float]) -> Cell:
    means = {policy: [9.0, 9.0] for policy in POLICIES}
    named = {name.replace("_", "-"): times for name, times in ttft_s.items()}
    return Cell(family, share, share, saturated, means | named)


def test_the_bound_differs_above_saturation() -> None:
    cells = [
        made(0, 1.0, least_cost=[1.03, 1.03], linear=[1.0, 1.0]),
        made(0, 1.1, least_cost=[1.03, 1.03], linear=[1.0, 1.0], saturated=True),
        made(1, 1.0, least_cost=[0.99, 0.97], lmetric=[1.0, 1.0]),
        *(made(2, share, least_cost=[1.0, 1.0], lmetric=[1.0, 1.0]) for share in SHARES),
    ]
    summed: dict[str, dict[str, dict[str, object]]] = msgspec.to_builtins(summary(cells))
    whole = summed["loads"]["all"]
    assert (whole["within_bounds"], whole["cells"], whole["worst"]) == (8, 9, 1.03)
    assert [summed["loads"][load]["within_bounds"] for load in ("1", "1.1")] == [2, 2]
    assert {name: count for name, count in summed["within_bounds"].items() if count} == {
        "least-cost": 8, "linear": 2, "lmetric": 6,
    }  # fmt: skip


def test_the_oracle_selects_the_best_policy_of_the_next_trace() -> None:
    """The best policy is linear on the second trace and lmetric on the first one, so the oracle
    selects the wrong one for each. The default is near the best on the first one only.
    """
    cells = [made(0, 1.0, least_cost=[1.0, 2.0], linear=[1.5, 1.0], lmetric=[1.0, 1.5])]
    assert families._one_trace(cells) == {"traces": 2, "default": 1, "oracle": 0}


@pytest.mark.long
def test_a_family_is_run_at_each_load_with_each_policy() -> None:
    cells = families.run(4, requests=100)
    assert [cell.share for cell in cells] == list(SHARES)
    for cell in cells:
        assert set(cell.ttft_s) == set(POLICIES)
        assert all(len(times) == 2 and min(times) > 0 for times in cell.ttft_s.values())
        assert cell.load == pytest.approx(cell.share * cells[3].load, abs=1e-4)


@pytest.mark.long
def test_the_command_prints_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    families.main("0", "2", "--smoke")
    printed = msgspec.json.decode(capsys.readouterr().out)
    assert printed["loads"]["all"]["cells"] == 2 * len(SHARES)


def best_of_all(trace: Trace, capacity: int) -> float:
    """Return the largest number trace_of leading hits that any eviction policy can reach."""
    requests = [set(blocks) for blocks in trace.blocks()]
    leads = trace.blocks()
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for blocks, members in zip(leads, requests, strict=True):
        after: dict[frozenset[int], int] = {}
        for inside, hits in states.items():
            lead = next((n for n, b in enumerate(blocks) if b not in inside), len(blocks))
            have = sorted(inside | members)
            for contents in combinations(have, min(capacity, len(have))):
                key = frozenset(contents)
                after[key] = max(after.get(key, 0), hits + lead)
        states = after
    return max(states.values()) / sum(trace.count)


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_exceeds_the_bound_and_one_reaches_it(seed: int) -> None:
    random = Random(seed)
    prompts = []
    for number in range(7):
        tree, count = random.randrange(3), random.randint(1, 3)
        prompts.append(
            TraceEntry(float(number), 16 * count, 1, [tree * 10 + n for n in range(count)])
        )
    trace = make_trace("small", 16, prompts, 1.0)
    for capacity in (3, 4, 5):
        assert bound(trace, capacity) == pytest.approx(best_of_all(trace, capacity))


def test_no_pair_of_policies_exceeds_the_bound() -> None:
    results = list(compare(conversations(), (0.1,), (0.1, 1.0)))
    assert all(0 < result.hit <= result.bound for result in results)
    (row,) = judge(results)
    assert row["trace"] == "conversations"
    assert row["best_hit"] == pytest.approx(
        max(
            sum(r.hit for r in results if (r.eviction, r.admission) == pair and r.disk) / 2
            for pair in {(r.eviction, r.admission) for r in results if r.disk}
        ),
        abs=1e-4,
    )


def trace_of(results: list[Result], pair: tuple[str, str]) -> Result:
    return next(r for r in results if (r.eviction, r.admission) == pair and r.disk)


def test_by_default_a_workload_without_reuse_writes_only_the_trial() -> None:
    trace = without_reuse(1000)
    results = list(compare(trace, (0.1,), (1.0,)))
    assert trace_of(results, DEFAULT).written * trace.id_count <= TRIAL + 1
    assert trace_of(results, ("lru", "always")).written == 1.0


@pytest.mark.long
def test_by_default_a_workload_with_only_a_shared_prompt_stops_saving() -> None:
    results = list(compare(shared_prompt(), (0.02,), (1.0,)))
    assert trace_of(results, DEFAULT).written < 0.1
    assert trace_of(results, DEFAULT).hit == trace_of(results, ("lru", "always")).hit


def test_the_smoke_run_writes_its_results(tmp_path: Path) -> None:
    tiers_policy.main("--smoke", str(tmp_path / "out.json"))
    report = read_record(tmp_path / "out.json")
    assert {row["trace"] for row in report["rows"]} == {"conversations", "without reuse"}
    assert len(report["judged"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the traces")
def test_the_default_is_near_the_best_on_the_conversation_trace() -> None:
    trace = load_trace(TRACES / "mooncake" / "conversation_trace.jsonl")
    (row,) = judge(list(compare(trace, (0.1,), (0.3, 1.0))))
    assert isinstance(row["ratio"], float)
    assert row["ratio"] >= 0.95


# ---- The comparison of all policies


def result(
    load: float, mean: float, error: float = 0.0, p90: float = 1.0, policy: str = DEFAULT_POLICY
) -> PolicyResult:
    return PolicyResult("trace", load, "pool", policy, 5, mean, error, p90, 0.0, 0.0, 0.0)


def test_the_default_is_within_bounds_below_and_above_saturation() -> None:
    results = [
        result(1.0, 1.02), result(1.0, 1.0, policy="linear"),
        result(1.2, 1.03), result(1.2, 1.0, policy="linear"),
        result(1.3, 1.03, 0.02), result(1.3, 1.0, 0.01, policy="linear"),
        result(2.0, 20.9), result(2.0, 20.0, policy="linear"),
        result(3.0, 42.2), result(3.0, 40.0, policy="linear"),
    ]  # fmt: skip
    rows = check(results)
    assert [row["holds"] for row in rows] == [True, False, True, True, False]
    assert [row["saturated"] for row in rows] == [False, False, False, True, True]
    assert {row["best"] for row in rows} == {"linear"}


def test_the_best_p90_and_the_best_mean_may_be_of_different_policies() -> None:
    results = [
        result(1.0, 1.0, p90=3.0), result(1.0, 1.1, p90=2.0, policy="linear"),
        result(2.0, 2.0, p90=7.0), result(2.0, 2.1, p90=4.0, policy="linear"),
    ]  # fmt: skip
    first, _ = check(results)
    assert first["best"] == DEFAULT_POLICY
    assert (first["default_p90_s"], first["best_p90"], first["best_p90_s"]) == (3.0, "linear", 2.0)
    [row] = check_goodput(results, {"trace": 5.0})
    assert (row["default"], row["best_policy"], row["best"]) == (1.5, "linear", 2.0)
    [row] = check_goodput(results, {"trace": 8.0})
    assert (row["default"], row["best_policy"]) == (2.0, DEFAULT_POLICY)
    [row] = check_goodput(results, {"trace": 2.5})
    assert (row["default"], row["best_policy"], row["best"]) == (None, "linear", 1.25)
    assert "| trace | 2.5 s | - | linear | 1.25x |" in policies.page(results, {"trace": 2.5})


def test_the_default_separates_tenant_prefixes_near_saturation() -> None:
    """On other seeds of the trace than the page's, where a copy of each prefix on each worker does
    not fit. The default had 2.1 times the mean TTFT of the best policy until it expected that space
    which is free now is taken when others come.
    """
    means = {DEFAULT_POLICY: 0.0, "linear": 0.0, "logit2": 0.0, "lmetric": 0.0}
    for seed in (21, 29, 37):
        trace = policies.tenant_prefixes(seed=seed)
        for name in means:
            row = simulate(trace, Options(speed=3.0), policies=[name], memories=["pool"])[0]
            means[name] += (row.ttft_mean_s or 0.0) / 3
    assert means[DEFAULT_POLICY] < 0.9 * min(means["linear"], means["logit2"], means["lmetric"])


def test_goodput_is_interpolated_between_measured_loads() -> None:
    results = [(2.0, 8.0), (1.0, 2.0)]
    assert goodput(results, 5.0) == pytest.approx(1.5)
    assert goodput(results, 9.0) == 2.0
    assert goodput(results, 1.0) is None


@pytest.mark.long
def test_one_command_writes_results_tables_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    page, target = tmp_path / "page.md", tmp_path / "out.json"
    page.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    policies.main("--smoke", str(target), str(page))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text
    written = read_record(target)
    rows = written["rows"]
    assert [row["trace"] for row in written["goodput"]] == ["without reuse"]
    assert {row["policy"] for row in rows} == set(POLICIES)
    assert all(f"| {name} |" in text for name in POLICIES)
    assert (tmp_path / "images/policies-without-reuse.svg").exists()

    # An older result of the default policy is replaced; results of other policies are kept.
    for row in rows:
        row["ttft_mean_s"] += 0.125
    target.write_bytes(msgspec.json.encode(written | {"commit": "first"}))
    policies.main("--again", "--smoke", str(target), str(page))
    second = read_record(target)
    assert second["kept_from"] == "first"
    for old, new in zip(rows, second["rows"], strict=True):
        reused = new["policy"] != DEFAULT_POLICY and new["seeds"] == old["seeds"]
        assert new["ttft_mean_s"] == pytest.approx(old["ttft_mean_s"] - 0.125 * (not reused))
