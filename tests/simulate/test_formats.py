# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The formats of traces: they are detected by their content, read, and rejected with one line.

The public forms of each trace format, what a guess shows, and how damaged files end.

The claim on a real trace, and the reference's table in docs/understand/benchmarks.md.
"""

import codecs
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beluga.errors import TraceError
from beluga.simulate import (
    FORMATS,
    PRESETS,
    Options,
    Row,
    Trace,
    load_trace,
    simulate,
    trace_requests,
)
from beluga.simulate.formats import _guess

TRACES = Path(__file__).resolve().parent.parent.parent.parent / "shared/traces"


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def real(name: str) -> Path:
    if not (TRACES / name).exists():
        pytest.skip(f"no {name} beside the checkout")
    return TRACES / name


def lines(*objects: object) -> str:
    return "".join(json.dumps(item) + "\n" for item in objects)


def written(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def session(first: int, *, size: int = 64) -> str:
    requests = [
        {"t": 0.0, "in": 2 * size, "out": 5, "hash_ids": [first, first + 1]},
        {"t": 9.0, "in": 3 * size + 1, "out": 5, "hash_ids": [first, first + 1, 7, 8]},
    ]
    return json.dumps({"block_size": size, "hash_id_scope": "local", "requests": requests})


def hashed(length: int, ids: Sequence[int], at: float = 0, output: int = 1) -> dict[str, object]:
    """Make a request of a Mooncake trace."""
    return {"timestamp": at, "input_length": length, "output_length": output, "hash_ids": [*ids]}


def mooncake(tokens: Sequence[int], size: int, *, gap: float = 1000) -> list[dict[str, object]]:
    return [
        hashed(length, range(-(-length // size)), at * gap, 4) for at, length in enumerate(tokens)
    ]


def test_incomplete_blocks_of_mooncake_are_ignored(tmp_path: Path) -> None:
    rows = [hashed(1025, [9, 5, 6], 3000), hashed(1024, [9, 5], 1000, 0)]
    trace = load_trace(written(tmp_path, lines(*rows)))
    assert (trace.block_tokens, trace.arrival_s) == (512, [0, 2])
    assert trace.blocks() == [[0, 1], [0, 1]]
    assert trace.output_tokens == [1, 1]


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
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    trace = load_trace(written(tmp_path, AZURE + rows))
    assert trace.arrival_s == pytest.approx([0, 0.052])
    assert (trace.input_tokens, trace.blocks()) == ([4808, 3180], [[], []])


def test_token_ids_share_their_common_prefix(tmp_path: Path) -> None:
    tokens = [list(range(40)), [*range(16), *range(100, 120)], [1, *range(1, 40)]]
    rows = [
        {"input_tok_ids": ids, "output_toks": 3, "arrival_time_ns": at * 10**9}
        for at, ids in enumerate(tokens)
    ]
    trace = load_trace(written(tmp_path, lines(*rows)))
    assert trace.blocks() == [[0, 1], [0, 2], [3, 4]]
    assert trace.arrival_s == [0, 1, 2]


def test_prompts_without_times_arrive_at_a_rate(tmp_path: Path) -> None:
    text = lines({"prompt": "word" * 40, "output_tokens": 7}) * 500
    trace = load_trace(written(tmp_path, text), rate=10)
    assert trace.duration_s == pytest.approx(50, rel=0.2)
    assert (trace.input_tokens[0], trace.output_tokens[0]) == (40, 7)
    assert trace.blocks()[0] == trace.blocks()[-1] == [0, 1]


def test_conversations_without_a_question_or_an_answer_are_left_out(tmp_path: Path) -> None:
    chats = [["abcd" * 20, "x" * 40], [], ["abc" * 4, "x" * 8, "more"], ["unanswered"]]
    rows = [conversation(*chat) for chat in (*chats, ["", "said"], ["ask", "x"])]
    trace = load_trace(written(tmp_path, json.dumps(rows)))
    assert (trace.input_tokens, trace.output_tokens) == ([20, 3, 1], [10, 2, 1])


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512, 1024])
def test_the_size_of_blocks_is_the_one_that_all_prompts_fit(tmp_path: Path, size: int) -> None:
    rows = [hashed(size - 1, [1]), hashed(3 * size - 1, [1, 2, 3])]
    assert load_trace(written(tmp_path, lines(*rows))).block_tokens == size


def test_an_ambiguous_block_size_must_be_specified(tmp_path: Path) -> None:
    path = written(tmp_path, lines(hashed(30_000, [1])))
    with pytest.raises(TraceError, match=r"agree on no size of blocks .* --block-tokens"):
        load_trace(path)
    trace = load_trace(path, block_tokens=30_000)
    assert (trace.block_tokens, trace.blocks()) == (30_000, [[0]])


def test_sessions_without_blocks_share_nothing(tmp_path: Path) -> None:
    bare = {"t": 0.5, "in": 3, "out": 5}
    sessions = ([bare], [], [{"t": 1, "in": 8, "out": 1, "hash_ids": [0]}] * 2)
    for name, requests in zip("abc", sessions, strict=True):
        text = json.dumps({"block_size": 8, "requests": requests})
        written(tmp_path, text, f"{name}.json")
    trace = load_trace(tmp_path)
    assert (trace.block_tokens, trace.arrival_s) == (8, [0, 0.5, 0.5])
    assert trace.blocks() == [[], [0], [0]]


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
    first = {"prompt": [1] * 15, "arrival_time_ns": 0, "output_toks": 1}
    text = lines(first) + "\n" + json.dumps({"prompt": [1] * 16, **row})
    trace = load_trace(written(tmp_path, text))
    assert trace.arrival_s == [0, arrival_s]
    assert trace.output_tokens[1] == requested
    assert trace.blocks() == [[], [0]]


def test_milliseconds_become_the_nearest_seconds(tmp_path: Path) -> None:
    times = [0, 9, 13, 27_482, 3_599_999]  # of which a product with 0.001 misses some
    path = written(tmp_path, lines(*(hashed(1, [0], time) for time in times)))
    assert load_trace(path).arrival_s == [time / 1000 for time in times]


def test_text_counts_four_characters_a_token(tmp_path: Path) -> None:
    texts = ["abcdefgh" * 8, "abcdefgh" * 8 + "i", "abcdefgi" * 8, "x" * 63]
    rows = lines(*({"prompt": text, "timestamp": 0} for text in texts))
    trace = load_trace(written(tmp_path, rows))
    assert trace.input_tokens == [16, 17, 16, 16]
    assert trace.blocks() == [[0], [0], [1], [2]]


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
    ("text", "what"),
    [
        ('{"timestamp": 1}\n', r"trace:1: .*missing required field"),
        ('{"prompt": 3}\n', r"trace:1: "),
        ('{"prompt": ""}\n', "neither input_tok_ids nor a prompt"),
        ("", "holds no requests"),
        ('{"block_size": 64}', "missing required field"),
        (session(1).replace('"block_size": 64', '"block_size": 0'), r"blocks of \[0\] tok"),
        (lines(hashed(0, [])), "has 0 tokens in"),
        (lines(hashed(-5, [])), "has -5 tokens in"),
        ("[3]", "holds no requests in a format"),
        ('[{"conversations": 3}]', r"item 1: .*an object with conversations"),
        ("[]", "holds no requests"),
        ("a,b\n1,2\n", "specify it with --format"),
        (AZURE + "x,1,2\n", r"trace:2: "),
        (AZURE + "2023-11-16 18:17:03.1,1\n", ":2: "),
    ],
)
def test_an_invalid_trace_is_rejected_in_one_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(TraceError, match=what) as caught:
        load_trace(written(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("none", {}, "No such file"),
        ("", {}, "has no"),
        ("", {"form": "x"}, f"'x' is not a format; use {FORMATS[0]}"),
        *(
            ("t", {"rate": rate}, r"--rate is .* must be finite")
            for rate in (0.0, -1.0, float("nan"), float("inf"))
        ),
        *(("/dev/zero", {"form": form}, "may have no end") for form in FORMATS),
        ("endless", {"form": "vllm"}, "bytes or more"),
        ("endless", {"form": "weka"}, "read at once"),
    ],
)
def test_missing_and_endless_files_and_wrong_options_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], what: str
) -> None:
    written(tmp_path, '{"prompt": "some text", "output_tokens": 1}\n', "t")
    os.truncate(written(tmp_path, "", "endless"), 1 << 40)  # sparse
    if not name:
        tmp_path = tmp_path / "empty"
        tmp_path.mkdir()
    with pytest.raises(TraceError, match=what):
        load_trace(tmp_path / name, **options)


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


def test_a_replay_names_every_block_of_every_format(tmp_path: Path) -> None:
    text = lines({"prompt": list(range(40)), "output_tokens": 3}) * 2
    (first, second), _ = trace_requests(written(tmp_path, text, "v"))
    assert (first.input_length, first.output_length, len(first.hash_ids)) == (40, 3, 3)
    assert first.hash_ids[:2] == second.hash_ids[:2]
    assert first.hash_ids[2] != second.hash_ids[2]  # partial blocks are not shared
    rows = AZURE + "2023-11-16 18:17:03,32,1\n2023-11-16 18:17:05,17,1\n"
    (first_row, second_row), _ = trace_requests(written(tmp_path, rows, "a"))
    assert (first_row.timestamp, second_row.timestamp) == (0, 2000)
    assert len({*first_row.hash_ids, *second_row.hash_ids}) == 4
    assert trace_requests(tmp_path / "v", "vllm")[0] == [first, second]


def chat(question: object, answer: str = "x" * 40) -> dict[str, object]:
    turns = {"user": question, "assistant": answer}
    return {"messages": [{"role": role, "content": text} for role, text in turns.items()]}


def conversation(*turns: object) -> dict[str, object]:
    return {"conversations": [{"from": "any", "value": turn} for turn in turns]}


GOOD = {
    "mooncake": lines(*mooncake([100, 33, 49] * 4, 16)),
    "weka": json.dumps(
        {
            "block_size": 16,
            "requests": [{"t": n / 2, "in": 40, "out": 3, "hash_ids": [1, n]} for n in range(9)],
        }
    ),
    "azure": AZURE + "".join(f"2024-05-10 00:00:0{n}.5+00:00,100,{n}\n" for n in range(9)),
    "burstgpt": BURST + "".join(f"{n},ChatGPT,40{n},7,41{n},API log\n" for n in range(9)),
    "vllm": lines(*({"prompt": "abcd" * 20, "timestamp": n} for n in range(9))),
    "sharegpt": json.dumps([conversation("abcd" * 20, "yes" * n) for n in range(1, 9)]),
    "openai": lines(*(chat("abcd" * n) for n in range(1, 9))),
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_guess_is_the_format_and_is_shown_with_its_option(tmp_path: Path, form: str) -> None:
    trace = load_trace(written(tmp_path, GOOD[form]))
    assert trace.reading is not None
    assert f"format {form} (guessed; --format)" in str(trace.reading)
    given = load_trace(tmp_path / "trace", form)
    assert f"format {form};" in str(given.reading)
    assert given.arrival_s == trace.arrival_s


@pytest.mark.parametrize("name", ["t.csv", "t.json", "t.jsonl", "t.txt", "t"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_format_depends_on_the_content_and_not_the_name(
    tmp_path: Path, form: str, name: str
) -> None:
    trace = load_trace(written(tmp_path, GOOD[form], name))
    assert trace.reading is not None
    assert trace.reading.form == form


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-le-mark", "utf-16-be-mark"]
)
@pytest.mark.parametrize("form", FORMATS)
def test_a_byte_order_mark_is_ignored(tmp_path: Path, form: str, encoding: str) -> None:
    text = GOOD[form]
    data = {
        "utf-16-le-mark": codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
        "utf-16-be-mark": codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    }.get(encoding) or text.encode(encoding)
    plain = load_trace(written(tmp_path, text, "plain"))
    marked = load_trace(written(tmp_path, data, "marked"))
    assert (marked.arrival_s, marked.blocks()) == (plain.arrival_s, plain.blocks())


@pytest.mark.parametrize("form", ["mooncake", "vllm", "openai", "sharegpt"])
def test_objects_are_read_from_lines_and_from_a_list(tmp_path: Path, form: str) -> None:
    text = GOOD[form]
    objects = (
        json.loads(text) if form == "sharegpt" else [json.loads(x) for x in text.split("\n")[:-1]]
    )
    by_line = load_trace(written(tmp_path, lines(*objects), "lines"))
    for indent in (None, 2):
        listed = load_trace(written(tmp_path, json.dumps(objects, indent=indent), "list"))
        assert listed.input_tokens == by_line.input_tokens
        assert listed.blocks() == by_line.blocks()


@pytest.mark.parametrize(
    "stamps",
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:05.4799600"),
        ("2024-05-10 00:00:00.500000+00:00", "2024-05-10 00:00:02+00:00"),
        ("2024-05-10T00:00:00.5Z", "2024-05-10T00:00:02Z"),
        ("2024-05-10T02:00:00.5+02:00", "2024-05-10T00:00:02z"),
        ("2024-05-09 17:00:00.5-0700", "2024-05-10 05:30:02 +05:30"),
        ("2024-05-10 00:00:00,5", "2024-05-10 00:00:02"),
        ("2024-05-10 00:00:00.5 UTC", "2024-05-10 00:00:02.000000000"),
        ("2024-02-28 23:59:59.5", "2024-02-29 00:00:01"),
    ],
)
@pytest.mark.parametrize("quote", ["", '"'])
def test_azures_times_have_any_time_zone_and_fraction(
    tmp_path: Path, stamps: tuple[str, str], quote: str
) -> None:
    if not quote and any("," in stamp for stamp in stamps):
        quote = '"'
    rows = "".join(f"{quote}{stamp}{quote},100,10\r\n" for stamp in stamps)
    trace = load_trace(written(tmp_path, AZURE + rows))
    assert trace.arrival_s == pytest.approx([0, 1.5], abs=1e-5)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_columns_are_found_by_name_in_any_order_and_with_any_delimiter(
    tmp_path: Path, delimiter: str
) -> None:
    rows = [
        ["NumImages", " GeneratedTokens", "TIMESTAMP", "ContextTokens"],
        ["3", "10", "2024-05-10 00:00:00", "374.0"],
        ["", "1", "2024-05-10 00:00:01", "5"],
    ]
    for change in (str, str.lower, str.upper):
        named = [[change(name) for name in rows[0]], *rows[1:]]
        trace = load_trace(written(tmp_path, "\n".join(delimiter.join(row) for row in named)))
        assert (trace.input_tokens, trace.output_tokens) == ([374, 5], [10, 1])


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("2024-13-10 00:00:00,1,1", "TIMESTAMP '2024-13-10 00:00:00' is not a date with time"),
        ("2024-05-10,1,1", "TIMESTAMP"),
        ("2024-05-10 00:00:00,many,1", "ContextTokens 'many' is not a number of tokens"),
        ("2024-05-10 00:00:00,1,1.5", "GeneratedTokens '1.5' is not"),
        ("2024-05-10 00:00:00,1,inf", "GeneratedTokens 'inf' is not"),
        ('2024-05-10 00:00:00,"1,1', "a row is one line"),
        ("2024-05-10 00:00:00,1", "2 values for 3 columns"),
        ("2024-05-10 00:00:00,1,1,1", "4 values for 3 columns"),
        ("2024-05-10 00:00:00,0,1", "0 tokens in"),
        ("2024-05-10 00:00:00,1e30,1", "tokens in"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_its_line_and_field(
    tmp_path: Path, row: str, what: str
) -> None:
    good = "2024-05-10 00:00:00,1,1\n"
    path = written(tmp_path, AZURE + good * 3 + row + "\n" + good * 5000)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}:5: ")
    assert what in str(caught.value)
    assert str(caught.value).endswith(
        "the format was guessed as azure, set --format if that is wrong"
    )
    with pytest.raises(TraceError) as caught:
        load_trace(path, "azure")
    assert "guessed" not in str(caught.value)


def test_failed_requests_of_burstgpt_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = (
        "5,ChatGPT,400,0,400,Conversation log\n45,GPT-4,401,18,419,API log\n85.5,GPT-4,7,9,16,x\n"
    )
    trace = load_trace(written(tmp_path, BURST + rows))
    assert trace.arrival_s == [0, 40.5]
    assert (trace.input_tokens, trace.output_tokens) == ([401, 7], [18, 9])
    assert "left out 1: requests that failed" in str(trace.reading)


def batch_line(path: str, **body: object) -> dict[str, object]:
    url = f"/v1/{path}completions"
    return {"custom_id": "1", "method": "POST", "url": url, "body": {"model": "m", **body}}


def test_messages_of_requests_share_their_common_prefix(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s" * 256}
    parts = [{"type": "text", "text": "abcd"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [[system, {"role": "user", "content": each}] for each in (parts, "other")]
    objects = [
        {"messages": messages[0], "max_tokens": 7},
        batch_line("chat/", messages=messages[1], max_completion_tokens=9),
        chat(None, answer="y" * 20),
    ]
    trace = load_trace(written(tmp_path, lines(*objects)))
    assert trace.reading is not None and trace.reading.form == "openai"
    assert trace.output_tokens == [7, 9, 5]
    first, second, _ = trace.blocks()
    assert first[:4] == second[:4]
    assert len(first) == 4


def test_a_batch_of_completions_is_read(tmp_path: Path) -> None:
    prompts = ["sixteen letters!" * 8] * 3 + [list(range(32))]
    rows = [batch_line("", prompt=prompt, max_tokens=8) for prompt in prompts]
    trace = load_trace(written(tmp_path, lines(*rows)))
    assert trace.reading is not None and trace.reading.form == "openai"
    assert (trace.input_tokens, trace.output_tokens) == ([32] * 4, [8] * 4)
    assert trace.blocks() == [[0, 1]] * 3 + [[2, 3]]


@pytest.mark.parametrize("odd_at", [0, 7, 39])
@pytest.mark.parametrize("size", [16, 64, 512])
def test_one_inconsistent_line_is_counted_and_keeps_the_block_size(
    tmp_path: Path, size: int, odd_at: int
) -> None:
    rows = mooncake([size * 3 + 1 + n % 5 for n in range(40)], size)
    rows[odd_at]["hash_ids"] = [0, 1, 2]
    trace = load_trace(written(tmp_path, lines(*rows)))
    assert trace.block_tokens == size
    assert "1 of 40 requests have another number of hash_ids" in str(trace.reading)


def test_blocks_without_partial_counts_have_a_size(tmp_path: Path) -> None:
    rows = mooncake([70, 130, 200], 64)
    for row in rows:
        row["hash_ids"] = list(range(int(str(row["input_length"])) // 64))
    trace = load_trace(written(tmp_path, lines(*rows)))
    assert trace.block_tokens == 64
    assert [len(blocks) for blocks in trace.blocks()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("gap", "unit", "arrivals"),
    [(1700.0, "ms", [0, 1.7, 3.4]), (1.7, "s", [0, 1.7, 3.4]), (90_000.5, "ms", [0, 90.0005])],
)
def test_the_unit_of_times_is_guessed_and_shown(
    tmp_path: Path, gap: float, unit: str, arrivals: list[float]
) -> None:
    path = written(tmp_path, lines(*mooncake([100] * 10, 16, gap=gap)))
    trace = load_trace(path)
    assert trace.arrival_s[: len(arrivals)] == pytest.approx(arrivals)
    assert f"times in {unit} (guessed; --time-unit)" in str(trace.reading)
    other = {"s": "ms", "ms": "s"}[unit]
    converted = load_trace(path, time_unit=other)
    assert converted.duration_s == pytest.approx(trace.duration_s * {"s": 1e3, "ms": 1e-3}[other])
    assert f"times in {other};" in str(converted.reading)
    requests, _ = trace_requests(path)
    assert requests[1].timestamp == pytest.approx(arrivals[1] * 1e3)


def test_dates_need_no_unit(tmp_path: Path) -> None:
    rows = mooncake([100] * 3, 16)
    for second, row in enumerate(rows):
        row["timestamp"] = f"2024-05-10T00:00:0{second}Z"
    path = written(tmp_path, lines(*rows))
    assert load_trace(path).arrival_s == [0, 1, 2]
    with pytest.raises(TraceError, match="no times that are numbers"):
        load_trace(path, time_unit="s")
    rows[1]["timestamp"] = 5
    with pytest.raises(TraceError, match="of 3 requests 1 have a number as their time, 2 a date"):
        load_trace(written(tmp_path, lines(*rows)))


ODD: list[object] = [
    "text", 3, None, [], {}, {"conversations": "x"}, {"conversations": ["human: x"]},
    {"conversations": [{"value": None}, {"value": "x"}]}, {"messages": [{"role": 3}]},
    {"messages": None}, {"messages": []}, {"prompt": {}}, {"prompt": ""}, {"prompt": [1.5]},
]  # fmt: skip


@pytest.mark.parametrize("form", ["vllm", "sharegpt", "openai"])
@pytest.mark.parametrize("odd", ODD, ids=str)
def test_one_unreadable_text_item_is_skipped_and_counted(
    tmp_path: Path, form: str, odd: object
) -> None:
    good = {
        "vllm": {"prompt": "some text"},
        "sharegpt": conversation("ask", "answer"),
        "openai": chat("some text"),
    }[form]
    for at in (0, 5, 20):
        items = [good] * 20
        items.insert(at, odd)
        for text in (lines(*items), json.dumps(items)):
            trace = load_trace(written(tmp_path, text), form)
            assert len(trace) == 20
            assert "skipped 1 of 21 items" in str(trace.reading)
    with pytest.raises(TraceError, match=r"\(9 of 20 items cannot be read\)"):
        load_trace(written(tmp_path, lines(*([good] * 11 + [odd] * 9))), form)


def test_lone_surrogates_are_text(tmp_path: Path) -> None:
    items = json.dumps([conversation("ask \ud83d" + "z" * 80, "answer \udc00")] * 2)
    trace = load_trace(written(tmp_path, items))
    assert trace.blocks()[0] == trace.blocks()[1] != []


def test_a_line_that_was_cut_off_is_skipped_in_text_and_refused_in_numbers(tmp_path: Path) -> None:
    text = lines(*[chat("some text")] * 20)
    assert len(load_trace(written(tmp_path, text[:-30]))) == 19
    numbers = lines(*mooncake([100] * 20, 16))
    with pytest.raises(TraceError, match=r":20: JSON is malformed: truncated"):
        load_trace(written(tmp_path, numbers[:-9]))


JUNK = [
    *(b"", b'"', b"{", b"[", b",", b"\n", b"\0", b"\xff\xfe", b"\\ud800", b"\xef\xbb\xbf", b"{}"),
    *(b"1e999", b"NaN", b"-1", b"null", b"true", b"9" * 30, b"9" * 5000, b"[" * 20_000),
]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    form=st.sampled_from(FORMATS),
    explicit=st.booleans(),
    seed=st.integers(0, 1 << 32),
    count=st.integers(1, 4),
)
def test_damaged_traces_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, form: str, explicit: bool, seed: int, count: int
) -> None:
    """Whatever bytes change, no library's exception is raised."""
    chance = random.Random(seed)
    data = GOOD[form].encode()
    for _ in range(count):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice((0, 0, 1, 2, 30)))
        data = data[:at] + chance.choice(JUNK) + data[end:]
        if chance.random() < 0.1:
            data = data[: chance.randrange(len(data) + 1)]
    path = written(tmp_path_factory.getbasetemp(), data, "damaged")
    other = chance.choice(FORMATS)
    for load in (load_trace, trace_requests):
        try:
            load(path, form if explicit else chance.choice((None, other)))
        except TraceError as error:
            assert "\n" not in str(error)
            assert str(path) in str(error) or path.name in str(error)


# The mean TTFT in seconds at twice the trace's speed, and the hit rate if it is given.
TABLE = {
    ("least-tokens", "split"): (8.66, 0.07),
    ("linear", "split"): (2.94, 0.16),
    ("min-ttft", "split"): (2.07, 0.19),
    ("least-tokens", "pool"): (1.86, 0.26),
    ("linear", "pool"): (1.85, None),
    ("min-ttft", "pool"): (1.59, None),
    ("round-robin", "pool"): (8.54, None),
}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace(real("mooncake/conversation_trace.jsonl"))


def mean(trace: Trace, options: Options, policy: str, memory: str) -> Row:
    return simulate(trace, options, policies=[policy], memories=[memory])[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "memory"), TABLE)
def test_the_references_replay_is_reproduced(trace: Trace, policy: str, memory: str) -> None:
    ttft_s, hit_rate = TABLE[policy, memory]
    row = mean(trace, PRESETS["feasibility"](Options(speed=2.0)), policy, memory)
    assert row.ttft_mean_s == pytest.approx(ttft_s, rel=0.15)
    if hit_rate is not None:
        assert row.hit_rate == pytest.approx(hit_rate, abs=0.02)


@pytest.mark.slow
def test_load_balancing_on_a_pool_matches_cache_aware_routing_and_beats_split_dram(
    trace: Trace,
) -> None:
    def ttft_s(policy: str, memory: str) -> float:
        return mean(trace, Options(speed=2.0), policy, memory).ttft_mean_s

    oblivious = ttft_s("least-tokens", "pool")
    assert oblivious <= 1.1 * ttft_s("linear", "pool")
    assert oblivious < min(ttft_s(each, "split") for each in ("linear", "cache-aware", "min-ttft"))


TIMED = {
    "mooncake": hashed(1024, [1, 2]),
    "vllm": {"prompt": "text", "output_tokens": 1},
    "openai": chat("text"),
    "a batch": batch_line("chat/", messages=chat("text")["messages"]),
}


def timed(folder: Path, form: str, name: str, *times: int) -> Trace:
    return load_trace(written(folder, lines(*({**TIMED[form], name: at} for at in times))))


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 1000)])
@pytest.mark.parametrize("form", TIMED)
def test_times_since_1970_are_recognized(tmp_path: Path, form: str, unit: str, scale: int) -> None:
    trace = timed(tmp_path, form, "timestamp", 1_764_000_000 * scale, 1_764_000_002 * scale)
    assert trace.reading is not None and trace.reading.time_unit == unit
    assert trace.arrival_s == [0, 2]


@pytest.mark.parametrize("form", ["vllm", "openai", "a batch"])
@pytest.mark.parametrize("name", ["arrival_time", "created"])
def test_a_time_by_another_name_is_refused(tmp_path: Path, form: str, name: str) -> None:
    with pytest.raises(TraceError, match=f"{name} is not read; name the time timestamp"):
        timed(tmp_path, form, name, 0, 1)
