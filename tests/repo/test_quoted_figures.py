# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A recorded result has its origin, and a commit that a page names as the origin of figures is that
of a recorded result. ``scripts/dev/gen_tables.py`` writes the figures into the tables.
"""

from __future__ import annotations

import re
from pathlib import Path

from beluga_bench.harness.recorded import read_record

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
PAGES = (
    *("README.md", "docs/understand/benchmarks.md", "docs/understand/paper.md"),
    *("docs/use/rpc.md", "docs/understand/comparison.md"),
    *("docs/understand/routing-results.md", "docs/understand/copy-engines.md"),
)
UNRECORDED = {
    "4e7d8c1": "one sentence about calls on an EPYC: to be recorded",
    "5adaf90": "four policies at 2.5x, which simulate-conversation.json leaves out",
    "a349972": "the code of the simulator that policies.json ran on, before its own commit",
    "e199e28": "the same",
    "249a911f": "probes of a GPU, which are marked as such",
    "3b5a594": "of Mooncake",
    "8770b65": "of NIXL",
    "4fd29ce": "of maru",
}


def test_figures_are_of_commits_with_recorded_files() -> None:
    """A commit without a file is listed with the reason, as long as a page names it."""
    recorded = set()
    for path in RESULTS.glob("*.json"):
        content = read_record(path)
        rows = content if isinstance(content, list) else [content]
        recorded |= {str(row.get("commit")).partition("-")[0][:7] for row in rows}
    named = set()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        named |= set(re.findall(r"\b(?=\w*[a-f])(?=\w*\d)[0-9a-f]{7,8}\b", text))
    assert {commit for commit in named if commit[:7] not in recorded} == set(UNRECORDED)


ORIGIN = {"machine", "commit", "date", "command"}
WITHOUT = {
    "before-after.json": {"commit", "command", "date"},  # commits and commands of both builds
    "vllm-disagg.json": ORIGIN,
} | {
    f"{name}.json": {"date"}
    for name in ("copy-cpu-epyc", "indexer", "scheduler", "vllm-bench", "vllm-demo")
}


def test_a_recorded_file_names_machine_commit_day_and_command() -> None:
    """Those in WITHOUT were recorded before results had these fields."""
    lacking = {}
    for path in RESULTS.glob("*.json"):
        content = read_record(path)
        rows = content if isinstance(content, list) else [content]
        if missing := {name for name in ORIGIN for row in rows if not row.get(name)}:
            lacking[path.name] = missing
    assert lacking == WITHOUT
