# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The comparison on random traces: the traces themselves, the knee, and the verdict."""

from __future__ import annotations

import msgspec
import pytest
from beluga_bench.studies import families
from beluga_bench.studies.families import SHARES, Cell, family_trace, knee, run, summary, ttft_s

from beluga.router import POLICIES
from beluga.simulate import Options


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
    named = {name.replace("_", "-"): found for name, found in ttft_s.items()}
    return Cell(family, share, share, saturated, means | named)


def test_the_bound_differs_above_saturation() -> None:
    cells = [
        made(0, 1.0, least_cost=[1.03, 1.03], linear=[1.0, 1.0]),
        made(0, 1.1, least_cost=[1.03, 1.03], linear=[1.0, 1.0], saturated=True),
        made(1, 1.0, least_cost=[0.99, 0.97], lmetric=[1.0, 1.0]),
        *(made(2, share, least_cost=[1.0, 1.0], lmetric=[1.0, 1.0]) for share in SHARES),
    ]
    found: dict[str, dict[str, dict[str, object]]] = msgspec.to_builtins(summary(cells))
    whole = found["loads"]["all"]
    assert (whole["within_bounds"], whole["cells"], whole["worst"]) == (8, 9, 1.03)
    assert [found["loads"][load]["within_bounds"] for load in ("1", "1.1")] == [2, 2]
    assert {name: count for name, count in found["within_bounds"].items() if count} == {
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
    cells = run(4, requests=100)
    assert [cell.share for cell in cells] == list(SHARES)
    for cell in cells:
        assert set(cell.ttft_s) == set(POLICIES)
        assert all(len(found) == 2 and min(found) > 0 for found in cell.ttft_s.values())
        assert cell.load == pytest.approx(cell.share * cells[3].load, abs=1e-4)


@pytest.mark.long
def test_the_command_prints_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    families.main("0", "2", "--smoke")
    printed = msgspec.json.decode(capsys.readouterr().out)
    assert printed["loads"]["all"]["cells"] == 2 * len(SHARES)
