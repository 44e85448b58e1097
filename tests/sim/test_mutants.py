# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""No verb and no check of the protocol is forgotten by scripts/mutants."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from exemptions import EXEMPTIONS
from mutants import NO_PROTOCOL, main, mutants, name_of, protocol_sites

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# What a verb made of verbs comes to.
COMPOUND = {
    "publish_line": ("stream_line", "fence_store"),
    "refetch": ("fence_full", "invalidate", "fence_full"),
    "stream_crc": ("stream",),
    "fetch_run": ("fetch",),
}
SIMPLE = (
    *("load64", "prefetch_line", "prefetch_range", "load_line", "fetch", "stream_line", "stream"),
    *("invalidate", "fence_store", "fence_full", "verify"),
)
USE = re.compile(rf"\bbl_({'|'.join([*SIMPLE, *COMPOUND])})\(")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def protocol_files() -> list[Path]:
    """All C that is no scenario and no tool, nor the verbs themselves."""
    return [
        path
        for path in sorted(CSRC.glob("*.[ch]"))
        if not path.name.startswith((*NO_PROTOCOL, "coherence"))
    ]


def test_every_verb_in_the_sources_is_a_site_of_the_build() -> None:
    written: Counter[tuple[str, str]] = Counter()
    for path in protocol_files():
        for verb in USE.findall(COMMENT.sub("", path.read_text())):
            written.update((path.name, part) for part in COMPOUND.get(verb, (verb,)))
    built = Counter((site.file, site.verb) for site in protocol_sites())
    assert built == written


def test_every_site_is_a_mutant_or_exempt_for_a_reason() -> None:
    assert len(mutants()) >= 25
    assert {name_of(site) for site in mutants()} | set(EXEMPTIONS) == {
        name_of(site) for site in protocol_sites()
    }
    assert all(len(reason.split()) > 5 for reason in EXEMPTIONS.values())


def test_a_mutant_is_caught_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--site", "bl_lane_send stream_line", "--seeds", "20", "--json"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert json.loads(first)["scenario"]
    assert last == "caught 1 of 1"


def test_a_survivor_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--site", "bl_lane_send stream_line", "--seeds", "0"]) == 1
    *_, survivor, _, last = capsys.readouterr().out.splitlines()
    assert survivor.startswith("survived 0 runs: lane.c")
    assert last == "caught 0 of 1"
