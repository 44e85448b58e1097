# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""docs/understand/complaints.md names only what exists: each answer can be looked up. So do all
other pages, where they name metrics, alerts and errors.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from support.shown import PAGES, name_of, spans
from test_docs import KNOWN, found_command, options_in, options_of, script_has

import beluga
from beluga import errors
from beluga.connectors.vllm.settings import VllmSettings

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/understand/complaints.md"
CAUSES_AND_VALUES = {"layout", "async"}  # of `beluga explain`, and of the setting `load`
METRICS = "\n".join(
    path.read_text()
    for path in (
        ROOT / "docs/operate/monitoring.md",
        *sorted((ROOT / "beluga/gateway").glob("*.py")),
    )
)
ALERTS = (ROOT / "docs/monitoring/alerts.yml").read_text()


def rows(text: str) -> list[list[str]]:
    """Return the cells of each complaint."""
    found = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| what users"))
    ]
    return [[*cells, ""][:4] for cells in found]


ROWS = rows(PAGE.read_text())


def exists(span: str) -> bool:  # noqa: PLR0911  a line for each kind of thing that is named
    """Whether everything that a row names in backticks exists."""
    words = span.split()
    if words[0] == "beluga":
        name = found_command(words)
        return name is not None and options_in(words) <= options_of(KNOWN[name])
    if words[0].startswith("scripts/"):
        return script_has(words)
    if words[:2] == ["python", "-m"]:
        return importlib.util.find_spec(words[2]) is not None
    if words[0].startswith("tests/"):
        path, _, function = span.partition("::")
        text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        return bool(text) and (not function or f"def {function}(" in text)
    if span.startswith("beluga_"):
        name = span.rstrip("*").removesuffix("_total")  # added by Prometheus's client
        return re.search(rf"\b{re.escape(name)}", METRICS) is not None
    if span.startswith("Beluga"):
        return f"alert: {span}\n" in ALERTS
    if span.endswith("Error"):
        return hasattr(errors, span)
    if span.startswith("KVCache."):
        return hasattr(beluga.KVCache, span.partition(".")[2])
    if span.startswith("--"):  # an option of the command that the row names before it
        return True
    return span in CAUSES_AND_VALUES or span in VllmSettings.__dataclass_fields__


def named(cells: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", " ".join(cells[2:]))


def missing(cells: list[str]) -> list[str]:
    """Return what a row names and does not exist."""
    spans = named(cells)
    wrong = [span for span in spans if not exists(span)]
    command = next((span for span in spans if span.startswith("beluga ")), "")
    options = [span for span in spans if span.startswith("--")]
    return wrong + [option for option in options if not exists(f"{command} {option}")]


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: str(cells[0])[:40])
def test_references_of_a_known_problem_exist(cells: list[str]) -> None:
    assert missing(cells) == []
    answered = not cells[2].startswith("Not addressed")
    assert not answered or any("`" in cell for cell in cells[3:]), "no evidence"
    assert re.search(r"[A-Za-z]#\d+|^LMCache$", cells[1]), "no source"


def test_the_page_has_every_problem_and_wrong_answers_are_detected() -> None:
    assert len(ROWS) >= 30
    assert missing(["", "", "`beluga serve --standby` or `--watch`", "`NoSpaceError`"]) == []
    wrong = (
        "`beluga serve --fast` `beluga_nothing_total` `NoError` `tests/repo/test_docs.py::test_x`"
    )
    assert len(missing(["", "", wrong, "`BelugaFine` `--nothing` `KVCache.fly`"])) == 7


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_metrics_alerts_and_errors_of_a_page_exist(path: Path) -> None:
    kind = re.compile(
        r"beluga_(?!bench)[a-z0-9_]+(?:_total|_seconds|_bytes|_blocks|_ratio)|[A-Z][a-z]\w+Error"
    )
    builtin = {"ValueError", "BelugaError"}
    named = [span for span in spans(path) if kind.fullmatch(span) and span not in builtin]
    assert [span for span in named if not exists(span)] == []
    assert name_of(path) != "docs/operate/troubleshooting.md" or len(named) > 20
