# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The formats of traces: they are detected by their content, read, and rejected with one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from beluga.errors import TraceError
from beluga.simulate import FORMATS, load_trace, trace_requests
from beluga.simulate.formats import _guess

TRACES = Path(__file__).resolve().parent.parent.parent.parent / "shared/traces"


def real(name: str) -> Path:
    if not (TRACES / name).exists():
        pytest.skip(f"no {name} beside the checkout")
    return TRACES / name


def session(first: int, *, size: int = 64) -> str:
    requests = [
        {"t": 0.0, "in": 2 * size, "out": 5, "hash_ids": [first, first + 1]},
        {"t": 9.0, "in": 3 * size + 1, "out": 5, "hash_ids": [first, first + 1, 7, 8]},
    ]
    return json.dumps({"block_size": size, "hash_id_scope": "local", "requests": requests})


def test_incomplete_blocks_of_mooncake_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 1025, "output_length": 1, "hash_ids": [9, 5, 6]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 0, "hash_ids": [9, 5]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = load_trace(path)
    assert trace.block_tokens == 512
    assert trace.arrival_s == [0, 2]
    assert trace.blocks() == [[0, 1], [0, 1]]
    assert trace.output_tokens == [1, 1]


def test_mooncake_blocks_may_be_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 33, "output_length": 1, "hash_ids": [1, 2, 3]}
    path.write_text(json.dumps(row))
    assert load_trace(path).block_tokens == 16


def test_weka_ids_are_local_to_their_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(session(1))
    trace = load_trace(tmp_path)
    assert trace.block_tokens == 64
    # The two sessions share nothing. A session's second request shares the first one's blocks.
    assert sorted(map(tuple, trace.blocks())) == [(0, 1), (0, 1, 4), (2, 3), (2, 3, 5)]


def test_weka_blocks_of_two_sizes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(session(1))
    (tmp_path / "b.json").write_text(session(1, size=32))
    with pytest.raises(TraceError, match=r"blocks of \[32, 64\] tokens"):
        load_trace(tmp_path)


def test_azure_traces_have_only_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    trace = load_trace(path)
    assert trace.arrival_s == pytest.approx([0, 0.052])
    assert (trace.input_tokens, trace.blocks()) == ([4808, 3180], [[], []])


def test_token_ids_share_their_common_prefix(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    tokens = [list(range(40)), [*range(16), *range(100, 120)], [1, *range(1, 40)]]
    rows = [
        {"input_tok_ids": ids, "output_toks": 3, "arrival_time_ns": at * 10**9}
        for at, ids in enumerate(tokens)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = load_trace(path)
    assert trace.blocks() == [[0, 1], [0, 2], [3, 4]]
    assert trace.arrival_s == [0, 1, 2]


def test_prompts_without_times_arrive_at_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text((json.dumps({"prompt": "word" * 40, "output_tokens": 7}) + "\n") * 500)
    trace = load_trace(path, rate=10)
    assert trace.duration_s == pytest.approx(50, rel=0.2)
    assert (trace.input_tokens[0], trace.output_tokens[0]) == (40, 7)
    assert trace.blocks()[0] == trace.blocks()[-1] == [0, 1]


def test_sharegpt_has_prompts_and_answers(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "abcd" * 20}, {"from": "gpt", "value": "x" * 40}]
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"id": 1, "conversations": turns}, {"conversations": []}]))
    trace = load_trace(path)
    assert (trace.input_tokens, trace.output_tokens) == ([20], [10])


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512, 1024])
def test_the_size_of_blocks_is_the_one_that_all_prompts_fit(tmp_path: Path, size: int) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 0, "input_length": size * n - 1, "output_length": 1, "hash_ids": ids}
        for n, ids in ((1, [1]), (3, [1, 2, 3]))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_trace(path).block_tokens == size


def test_an_ambiguous_block_size_must_be_specified(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 30_000, "output_length": 1, "hash_ids": [1]}
    path.write_text(json.dumps(row))
    with pytest.raises(TraceError, match=r"agree on no size of blocks .* --block-tokens"):
        load_trace(path)
    trace = load_trace(path, block_tokens=30_000)
    assert (trace.block_tokens, trace.blocks()) == (30_000, [[0]])


def test_sessions_without_blocks_share_nothing(tmp_path: Path) -> None:
    bare = {"block_size": 8, "requests": [{"t": 0.5, "in": 3, "out": 5}]}
    (tmp_path / "a.json").write_text(json.dumps(bare))
    (tmp_path / "b.json").write_text(json.dumps({**bare, "requests": []}))
    (tmp_path / "c.json").write_text(json.dumps(
        {"block_size": 8, "requests": [{"t": 1, "in": 8, "out": 1, "hash_ids": [0]}] * 2}
    ))  # fmt: skip
    trace = load_trace(tmp_path)
    assert (trace.block_tokens, trace.arrival_s) == (8, [0, 0.5, 0.5])
    assert trace.blocks() == [[], [0], [0]]


def test_a_session_of_blocks_without_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(session(1).replace('"block_size": 64', '"block_size": 0'))
    with pytest.raises(TraceError, match=r"blocks of \[0\] tokens"):
        load_trace(path)


@pytest.mark.parametrize(
    ("row", "arrival_s", "requested"),
    [
        ({"arrival_time_ns": 5e8, "timestamp": 7.0, "output_toks": 3, "output_tokens": 4}, 0.5, 3),
        ({"timestamp": 7.0, "output_tokens": 4}, 7.0, 4),
        ({"timestamp": 7.0}, 7.0, 1),
    ],
)
def test_times_and_lengths_may_have_several_names(
    tmp_path: Path, row: dict[str, object], arrival_s: float, requested: int
) -> None:
    path = tmp_path / "t.jsonl"
    first = {"prompt": [1] * 15, "arrival_time_ns": 0, "output_toks": 1}
    lines = [json.dumps(first), "", json.dumps({"prompt": [1] * 16, **row})]
    path.write_text("\n".join(lines))
    trace = load_trace(path)
    assert trace.arrival_s == [0, arrival_s]
    assert trace.output_tokens[1] == requested
    assert trace.blocks() == [[], [0]]


def test_milliseconds_become_the_nearest_seconds(tmp_path: Path) -> None:
    times = [0, 9, 13, 27_482, 3_599_999]  # of which a product with 0.001 misses some
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": time, "input_length": 1, "output_length": 1, "hash_ids": [0]}
        for time in times
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_trace(path).arrival_s == [time / 1000 for time in times]


def test_text_counts_four_characters_a_token(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    texts = ["abcdefgh" * 8, "abcdefgh" * 8 + "i", "abcdefgi" * 8, "x" * 63]
    path.write_text("".join(json.dumps({"prompt": text, "timestamp": 0}) + "\n" for text in texts))
    trace = load_trace(path)
    assert trace.input_tokens == [16, 17, 16, 16]
    assert trace.blocks() == [[0], [0], [1], [2]]


def test_conversations_without_a_question_or_an_answer_are_left_out(tmp_path: Path) -> None:
    chats = [["abc" * 4, "x" * 8, "more"], ["unanswered"], ["", "said"], ["ask", "x"]]
    rows = [{"conversations": [{"value": turn} for turn in chat]} for chat in chats]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(rows))
    trace = load_trace(path)
    assert (trace.input_tokens, trace.output_tokens) == ([3, 1], [2, 1])


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('\n [{"conversations": []}]', "sharegpt"),
        ('{"hash_id_scope": "local"}', "weka"),
        ('{"input_tok_ids": [1]}', "vllm"),
        ('{"prompt": ""}', "vllm"),
        ('{"timestamp": 0}', "mooncake"),
        ("TIMESTAMP,ContextTokens", "azure"),
    ],
)
def test_formats_are_detected_by_the_head_of_a_file(tmp_path: Path, text: str, form: str) -> None:
    (tmp_path / "trace").write_text(text)
    assert _guess(tmp_path / "trace") == form


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("t.jsonl", '{"timestamp": 1}\n', r"t\.jsonl:1: .*missing required field"),
        ("t.jsonl", '{"prompt": 3}\n', r"t\.jsonl:1: "),
        ("t.jsonl", '{"prompt": ""}\n', "neither input_tok_ids nor a prompt"),
        ("t.jsonl", "", "holds no requests"),
        ("t.json", '{"block_size": 64}', "missing required field"),
        ("t.json", "[3]", "holds no requests in a format"),
        ("t.json", '[{"conversations": 3}]', r"item 1: .*an object with conversations"),
        ("t.json", "[]", "holds no requests"),
        ("t.csv", "a,b\n1,2\n", "specify it with --format"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,2\n", r"t\.csv:2: "),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1,1\n", ":2: "),
    ],
)
def test_an_invalid_trace_is_rejected_in_one_line(
    tmp_path: Path, name: str, text: str, what: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=what) as caught:
        load_trace(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, -5])
def test_a_request_without_a_prompt_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": []}
    path.write_text(json.dumps(row))
    with pytest.raises(TraceError, match=f"has {length} tokens in"):
        load_trace(path)


def test_missing_files_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        load_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="has no"):
        load_trace(tmp_path)
    with pytest.raises(TraceError, match=f"'x' is not a format; use {FORMATS[0]}"):
        load_trace(tmp_path, "x")


@pytest.mark.parametrize(
    ("name", "requests", "ideal"),
    [
        ("mooncake/conversation_trace.jsonl", 12031, 0.366),
        ("weka", 950, 0.963),
        ("azure/AzureLLMInferenceTrace_code.csv", 8819, 0.0),
        ("llmservingsim/sharegpt-qwen3-32b-300-sps10.jsonl", 300, 0.08),
    ],
)
def test_real_traces_have_the_reuse_of_the_reference(
    name: str, requests: int, ideal: float
) -> None:
    trace = load_trace(real(name))
    assert len(trace) == requests
    assert trace.ideal_hit_rate == pytest.approx(ideal, abs=0.003)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_rate_is_rejected(tmp_path: Path, rate: float) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "some text", "output_tokens": 1}\n')
    with pytest.raises(TraceError, match=r"--rate is .* must be finite"):
        load_trace(tmp_path / "t.jsonl", rate=rate)


@pytest.mark.parametrize("form", FORMATS)
def test_an_endless_file_is_rejected(form: str) -> None:
    with pytest.raises(TraceError, match="may have no end"):
        load_trace(Path("/dev/zero"), form)


def test_an_endless_line_is_rejected(tmp_path: Path) -> None:
    with (tmp_path / "t.jsonl").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(TraceError, match="bytes or more"):
        load_trace(tmp_path / "t.jsonl", "vllm")
    with pytest.raises(TraceError, match="read at once"):
        load_trace(tmp_path / "t.jsonl", "weka")


def test_a_replay_names_every_block_of_every_format(tmp_path: Path) -> None:
    (tmp_path / "v.jsonl").write_text(
        json.dumps({"prompt": list(range(40)), "output_tokens": 3}) + "\n"
    )
    (tmp_path / "v.jsonl").write_text((tmp_path / "v.jsonl").read_text() * 2)
    (one, two), _ = trace_requests(tmp_path / "v.jsonl")
    assert (one.input_length, one.output_length, len(one.hash_ids)) == (40, 3, 3)
    assert one.hash_ids[:2] == two.hash_ids[:2]
    assert one.hash_ids[2] != two.hash_ids[2]  # partial blocks are not shared
    (tmp_path / "a.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03,32,1\n2023-11-16 18:17:05,17,1\n"
    )
    (first, second), _ = trace_requests(tmp_path / "a.csv")
    assert (first.timestamp, second.timestamp) == (0, 2000)
    assert len({*first.hash_ids, *second.hash_ids}) == 4
    assert trace_requests(tmp_path / "v.jsonl", "vllm")[0] == [one, two]
