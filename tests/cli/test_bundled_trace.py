# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Commands use a generated trace if no trace is named."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.emulation import long

from beluga.replay import default_requests
from beluga.simulate import found_shares, load_trace

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_default_trace_is_always_the_same() -> None:
    """The documentation has figures of it."""
    text = b"".join(msgspec.json.encode(request) for request in default_requests())
    assert hashlib.sha256(text).hexdigest().startswith("1f5cf5abba43b2726b588d6730d00ea1")
    reading = load_trace(None).reading
    assert reading is not None
    assert (reading.form, reading.time_unit, reading.block_tokens) == ("mooncake", "ms", 512)


@pytest.mark.parametrize(
    ("command", "requests"),
    [
        (("simulate", "--policy", "least-tokens", "--memory", "pool"), 1200),
        long(("replay", "--block-bytes", "4K"), 1200),
        (("size",), 1200),
    ],
)
def test_commands_use_the_trace_and_report_it(
    run: Run, command: tuple[str, ...], requests: int
) -> None:
    ended = run(*command, "--json")
    assert ended.returncode == 0, ended.stderr
    assert "no trace is given; using 1,200 requests of synthetic conversations" in ended.stderr
    result = json.loads(ended.stdout)
    row = result[0] if isinstance(result, list) else result.get("trace", result)
    assert row["requests"] == requests


@pytest.mark.parametrize("command", ["simulate", "replay"])
@pytest.mark.parametrize(
    "option", ["--format=azure", "--time-unit=s", "--block-tokens=16", "--rate=2"]
)
def test_options_of_traces_require_a_trace(run: Run, command: str, option: str) -> None:
    refused = run(command, option)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "need a trace; name one" in refused.stderr


def test_size_needs_no_argument_and_shows_the_ideal_hit_rate(run: Run) -> None:
    result = json.loads(run("size", "--json").stdout)
    assert result["bytes_per_token"] == 256 << 10  # Qwen3-32B
    (pool,) = result["tiers"]
    assert pool["found"] == pytest.approx(result["trace"]["ideal_hit_rate"])
    assert pool["size_bytes"] >= result["trace"]["bytes"]


def test_size_prints_cumulative_hit_rates_of_tiers(run: Run) -> None:
    result = json.loads(run("size", "--json", "--memory", "100G", "--disk", "200G").stdout)
    memory, disk = (tier["found"] for tier in result["tiers"])
    assert 0.3 < memory < disk < result["trace"]["ideal_hit_rate"]


def test_a_cache_finds_the_leading_blocks_that_it_holds(tmp_path: Path) -> None:
    lines = [[1, 2], [3, 4], [1, 2], [5, 2]]
    text = "".join(
        json.dumps({"timestamp": at, "input_length": 32, "output_length": 1, "hash_ids": ids})
        + "\n"
        for at, ids in enumerate(lines)
    )
    (tmp_path / "trace").write_text(text)
    trace = load_trace(tmp_path / "trace", block_tokens=16)
    # With room for 4 blocks, [1, 2] is a hit; with room for 2, [3, 4] has evicted it. 2 after 5 is
    # not a prefix.
    assert found_shares(trace, [2, 4]) == [0, 2 / 8]


def test_size_takes_a_trace_without_blocks(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,100,10\n")
    result = json.loads(run("size", "--json", "--trace", path).stdout)
    assert [tier["found"] for tier in result["tiers"]] == [0]
