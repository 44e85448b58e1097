# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Traces: they are read, rejected with the line number, and have an ideal hit rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from beluga.errors import TraceError
from beluga.replay import Conversations, TraceRequest, ideal_hit_rate, make_workload, write_trace
from beluga.replay import read_trace as read

GOOD = '{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [4, 5]}\n'
TRACES = Path(__file__).resolve().parent.parent.parent.parent / "shared/traces"


def request(*blocks: int) -> TraceRequest:
    return TraceRequest(timestamp=0, input_length=1, output_length=1, hash_ids=list(blocks))


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    requests = make_workload(Conversations(conversation_count=3))
    write_trace(requests, tmp_path / "trace")
    assert read(tmp_path / "trace") == requests


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("not json", "malformed"),
        ('{"timestamp": 1}', "missing required field"),
        (GOOD.replace("[4, 5]", '"45"'), "hash_ids"),
        (GOOD.replace("[4, 5]", "[-1]"), "below 0"),
        (GOOD.replace("[4, 5]", "[9223372036854775808]"), "63 bits"),
        (GOOD.strip()[:-1], "truncated"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    trace = tmp_path / "trace"
    trace.write_text(GOOD + "\n" + line + "\n" + GOOD)
    with pytest.raises(TraceError, match=f"^{trace}:3: .*{what}") as caught:
        read(trace)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(TraceError, match="holds no requests"):
        read(tmp_path / "trace")


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "trace")


def test_ideal_hits_are_leading_blocks_of_earlier_requests() -> None:
    assert ideal_hit_rate([request(1, 2), request(1, 2, 3), request(9, 1, 2)]) == 2 / 8


def test_ideal_hit_rate_of_the_conversation_trace() -> None:
    trace = TRACES / "mooncake/conversation_trace.jsonl"
    if not trace.exists():
        pytest.skip(f"no {trace.name} beside the checkout")
    requests = read(trace)
    assert len(requests) == 12031
    assert round(ideal_hit_rate(requests), 3) == 0.366


def test_a_workload_is_the_same_every_time_and_shares_prefixes() -> None:
    shape = Conversations(conversation_count=20, turn_count=4)
    requests = make_workload(shape)
    assert requests == make_workload(shape)
    assert len(requests) == 80
    assert [r.timestamp for r in requests] == sorted(r.timestamp for r in requests)
    assert ideal_hit_rate(requests) > 0.5


def test_a_line_without_end_is_refused_as_it_is_read() -> None:
    with pytest.raises(TraceError, match="/dev/zero:1: a line of 16777216 bytes or more"):
        read(Path("/dev/zero"))


def test_the_workload_is_made_of_120_conversations_of_ten_turns() -> None:
    requests = make_workload(Conversations())
    assert len(requests) == 1200
    assert len({tuple(one.hash_ids[:12]) for one in requests}) == 3
    assert {len(one.hash_ids[:12]) for one in requests} == {12}
    answers = {one.output_length // 16 for one in requests}
    assert answers == set(range(1, 9))
    assert all(one.input_length == 16 * len(one.hash_ids) for one in requests)
    assert all(one.output_length % 16 == 0 for one in requests)
    # Conversations start within the 5 s that one takes, with half a second between turns on
    # average.
    assert requests[0].timestamp < 500
    assert 5000 < requests[-1].timestamp < 20000
    firsts = [one for one in requests if len(one.hash_ids) * 16 - one.output_length == 12 * 16]
    assert len(firsts) == 120
    assert 4000 < max(one.timestamp for one in firsts) < 5000
    spans = [one.timestamp for one in requests if one not in firsts]
    assert sum(spans) / len(spans) == pytest.approx(2500 + 5 * 500, rel=0.1)


def test_another_seed_makes_another_workload() -> None:
    assert make_workload(Conversations(seed=2)) != make_workload(Conversations())
    assert make_workload(Conversations(seed=1)) == make_workload(Conversations())
