# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Parses a page strictly: elements are closed, ids are unique, and nothing is loaded from
elsewhere.
"""

import re
from html.parser import HTMLParser
from typing import Any

from beluga_bench import FIELDS, Row

_VOID = {"meta", "br", "link", "img"}
_OUTSIDE = {"src", "srcset", "action", "data", "poster", "xlink:href"}


class Page(HTMLParser):
    """A page's text by element. Raises AssertionError for a page that is not well formed."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.ids: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.links: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == [], f"not closed: {self.open}"
        assert len(self.ids) == len(set(self.ids)), self.ids
        assert {link.removeprefix("#") for link in self.links} <= set(self.ids)
        assert not re.search(r"url\(|@import", "".join(self.texts["style"]))
        assert "script" not in self.count

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"{tag} has an attribute twice"
        assert not any(name.startswith("on") or name in _OUTSIDE for name in given), given
        assert (given.get("href") or "#").startswith("#"), given
        self.count[tag] = self.count.get(tag, 0) + 1
        self.texts.setdefault(tag, []).append("")
        if "id" in given:
            self.ids.append(given["id"] or "")
        if "href" in given:
            self.links.append(given["href"] or "")
        if tag == "svg":
            assert given.get("aria-label") or given.get("aria-hidden"), given
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data


# ---- Rows


def row(bench: str = "rpc", case: str = "c", **given: Any) -> Row:
    made: Row = {
        **dict.fromkeys(FIELDS), "bench": bench, "case": case, "machine": "a CPU",
        "commit": "unknown", "date": "2026-01-02", "command": f"beluga bench {bench}",
        "memory": "devdax", "coherence": "software", "p50_ns": 950.0, "p99_ns": 1234.0,
        "ops_per_s": 1_100_000, "depth": 1, "limit": 2_200_000, "limit_unit": "ops/s",
        "ratio_to_limit": 0.5, "ratio_q1": 0.4, "ratio_q3": 0.6, "noisy": False,
    }  # fmt: skip
    return made | given
