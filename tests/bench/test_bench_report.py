# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The page of benchmarks: its figures are the rows', and it shows important limits prominently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from beluga_bench import Recorded, Results, Row, load, report
from beluga_bench.harness.charts import charts
from beluga_bench.harness.row import Recorder, is_emulated, is_smoke
from numpy import float64
from page.bench_row import row
from page.well_formed import Page

from beluga.errors import BelugaError

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = sorted((ROOT / "bench/results").glob("*.json"))


def page(*rows: Row, **given: Any) -> Page:
    return Page(report(Results(rows=rows, source="made up", **given)))


def test_every_figure_of_a_row_is_on_the_page_with_its_origin() -> None:
    read = page(row())
    cells = read.texts["td"]
    for text in ("950 ns", "1.23 us", "1.1 M/s", "2.2 M/s", "0.5 (0.4, 0.6)", "devdax"):
        assert text in cells, text
    assert any(
        "a CPU, commit unknown, 2026-01-02, command: beluga bench rpc" in text
        for text in read.texts["p"]
    )
    assert "Half of 1 measured cases reach 50 % or more" in read.texts["p"][0].replace("\xa0", " ")
    assert "50 % of the limit's speed, devdax" in read.texts["dd"]


def warnings(read: Page) -> str:
    return " ".join(text for text in read.texts["p"])


def test_a_normal_run_has_no_warning() -> None:
    shown = warnings(page(row()))
    assert not any(word in shown for word in ("SMOKE", "Emulated", "Noisy", "missing", "machines"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"command": "beluga bench rpc --smoke"}, "SMOKE RUN"),
        ({"noisy": True}, "Noisy: in 1 of 1 rows"),
        ({"memory": "tmpfs/DRAM"}, "Emulated memory"),
        ({"memory": "ext4 file"}, "Emulated memory"),
        ({"memory": "paced"}, "Emulated memory"),
    ],
)
def test_important_limits_are_shown_prominently(given: dict[str, Any], message: str) -> None:
    read = page(row(**given))
    assert message in warnings(read)
    assert "(" in next(text for text in read.texts["h2"] if text.startswith("rpc"))


def test_a_smoke_run_is_marked_in_headline_title_and_each_chart() -> None:
    read = page(*(row(depth=depth, command="beluga bench rpc --smoke") for depth in (1, 8)))
    assert read.texts["title"][0].startswith("Smoke run")
    assert read.texts["p"][0].startswith("SMOKE RUN")
    assert all("SMOKE RUN" in text for text in read.texts["figcaption"])
    assert len(read.texts["figcaption"]) == 2


def test_missing_rows_are_listed_with_their_reason() -> None:
    read = page(row(), missing={"latency": "the run was interrupted", "copy": "it failed: <x>"})
    assert "latency is missing: the run was interrupted" in warnings(read)
    assert "copy is missing: it failed: <x>" in warnings(read)


def test_runs_of_other_machines_are_shown_separately() -> None:
    read = page(row(depth=1), row(depth=8, machine="another CPU"))
    assert "The rows come from 2 machines" in warnings(read)
    assert sum(text.startswith("From a") for text in read.texts["p"]) == 2


def test_skipped_cases_have_their_reason_and_no_empty_row() -> None:
    lacking = row("latency", "dsa read", note="skipped: no <dsa>", ops_per_s=None,
                  ratio_to_limit=None)  # fmt: skip
    read = page(row("latency", "read", bytes=64), lacking)
    assert "dsa read: no <dsa>" in read.texts["li"]
    assert "dsa read" not in read.texts["td"]


def test_peers_of_the_run_and_recorded_peers_are_distinct() -> None:
    peer = row("copy", "gather_write", peer="numpy", ratio_to_peer=2.5, gb_per_s=8.0)
    old = Recorded("demo.json", {"machine": "M", "commit": "unknown", "date": "2025-05-05",
                                 "command": "demo", "ttft_hit_s": 0.1, "prompt_tokens": 9,
                                 "peers": {"<other>": 0.2}})  # fmt: skip
    read = page(row(), peer, recorded=[old])
    assert "ours is 2.5 times as fast" in read.texts["td"]
    assert "unknown, 2026-01-02" in read.texts["td"]
    assert "demo.json: M, commit unknown, 2025-05-05, command: demo" in read.texts["p"]
    assert "from <other>" in read.texts["td"] and "200 ms" in read.texts["td"]


def test_hostile_names_are_escaped() -> None:
    evil = "<script>alert(1)</script>"
    read = page(row(evil, evil, machine=evil, commit=evil, note=evil, memory=evil, command=evil))
    assert evil in read.texts["td"]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_every_recorded_file_makes_a_page(path: Path) -> None:
    content = load(path)
    if isinstance(content, Recorded):
        read = page(recorded=[content])
        assert any(content.content.get("machine", "") in text for text in read.texts["p"])
    else:
        read = page(*content)
        assert set(read.ids) >= {f"bench-{row['bench']}" for row in content}
        assert all(charts([r for r in content if r["bench"] == name]) for name in
                   {row["bench"] for row in content})  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "has no results"),
        (b"[1]", "has no results"),
        (b"3", "has no results"),
        (b'[{"bench": "a", "case": "b", "p50_ns": "soon"}]', "p50_ns of case 'b' is 'soon'"),
        (b'[{"bench": "a", "case": "b", "limit": []}]', "limit of case 'b' is []"),
    ],
)
def test_files_without_results_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(BelugaError, match=r"x\.json") as refused:
        load(path)
    assert message in str(refused.value)


def test_rows_have_a_date_and_numbers_that_are_valid_json() -> None:
    from beluga_bench import Options

    made = Recorder("rpc", Options(smoke=True), {"memory": "paced"}).row("c", p50_ns=float64(2.5))
    assert msgspec.json.decode(msgspec.json.encode(made))["p50_ns"] == 2.5
    assert len(str(made["date"])) == len("2026-01-02")
    assert is_smoke(made) and is_emulated(made)
