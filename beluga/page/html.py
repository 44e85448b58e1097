# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Parts of a page. Every function takes plain text, escapes it, and returns HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from beluga.page.chart import Chart, LineChart, svg, swatch, values

_LIGHT = (
    "--back:#fff;--ink:#1b1f24;--soft:#59636e;--grid:#e3e6ea;--card:#f5f7f9;--warn:#fff3d6;"
    "--edge:#b26a00;--s0:#0067a5;--s1:#c8540a;--s2:#00795a;--s3:#9b3f7f;--s4:#7a6200;--s5:#3f8fc4;"
    "--s6:#5b5b5b"
)
_DARK = (
    "--back:#14171b;--ink:#e8eaed;--soft:#a3abb5;--grid:#31363d;--card:#1e2329;--warn:#3a2f14;"
    "--edge:#e0a030;--s0:#5cb3f2;--s1:#ff9a52;--s2:#3ccf9f;--s3:#e79acb;--s4:#e3c84a;--s5:#a9d6f5;"
    "--s6:#bdbdbd"
)
_SERIES = "".join(f".s{at}{{--c:var(--s{at})}}" for at in range(7))
_STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    "*{box-sizing:border-box}"
    "body{font:16px/1.5 system-ui,sans-serif;background:var(--back);color:var(--ink);"
    "max-width:76rem;margin:0 auto;padding:1.5rem 1rem 3rem}"
    "h1{font-size:1.05rem;font-weight:600;color:var(--soft);margin:0;overflow-wrap:anywhere}"
    "h2{font-size:1.25rem;margin:2.2rem 0 .6rem}"
    ".lead{font-size:clamp(1.3rem,4vw,2rem);line-height:1.25;font-weight:600;margin:.4rem 0 1rem;"
    "max-width:48rem;overflow-wrap:anywhere}"
    ".warn{background:var(--warn);border-left:4px solid var(--edge);padding:.6rem .9rem;"
    "margin:.6rem 0;overflow-wrap:anywhere}"
    ".cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,13.5rem),1fr));"
    "gap:.7rem;padding:0;margin:1rem 0}"
    ".cards>div{background:var(--card);border-radius:8px;padding:.7rem .9rem}"
    ".cards dt{color:var(--soft);font-size:.85rem}"
    ".cards dd{margin:0;font-size:1.6rem;font-weight:600;line-height:1.25}"
    ".cards dd.than{font-size:.85rem;font-weight:400;color:var(--soft);line-height:1.4}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,22rem),1fr));"
    "gap:1.6rem}"
    "figure{margin:0;min-width:0;max-width:38rem}figcaption{font-weight:600}"
    "figcaption small{display:block;font-weight:400;color:var(--soft);font-size:.85rem}"
    "figure>svg{width:100%;height:auto;display:block;margin-top:.3rem}"
    "svg text{font:13px system-ui,sans-serif;fill:var(--ink)}"
    "svg text.n,svg text.t{fill:var(--soft)}"
    "svg .g{stroke:var(--grid);fill:none}svg .e{stroke:var(--ink);stroke-width:1.5;fill:none}"
    "svg .l{stroke:var(--c);stroke-width:2;fill:none;stroke-linejoin:round}"
    f"svg .m,svg .b{{fill:var(--c)}}{_SERIES}"
    ".key{display:flex;flex-wrap:wrap;gap:.15rem 1rem;list-style:none;padding:0;margin:.3rem 0;"
    "font-size:.85rem}.key svg{vertical-align:-2px;margin-right:.35rem}"
    "details{margin:.4rem 0;font-size:.9rem}summary{cursor:pointer;color:var(--soft)}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;"
    "font-variant-numeric:tabular-nums}"
    "th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--grid);"
    "white-space:nowrap}th{color:var(--soft);font-weight:600;vertical-align:bottom}"
    "td.x,th.x{text-align:left}td.w{white-space:normal;min-width:20rem;text-align:left}"
    ".facts{display:grid;grid-template-columns:minmax(7rem,auto) 1fr;gap:.25rem 1rem;margin:0}"
    ".facts dt{color:var(--soft)}.facts dd{margin:0;overflow-wrap:anywhere}"
    "nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.8rem 0}a{color:var(--s0)}"
    ".wide:focus,a:focus,summary:focus{outline:2px solid var(--s0);outline-offset:2px}"
    "@media print{details{display:none}}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LONG = 32  # characters of a cell that is broken into lines


@dataclass(frozen=True, slots=True)
class Card:
    """One figure: its name, its value with the unit, and a value for comparison."""

    name: str
    value: str
    than: str = ""


def page(title: str, lead: str, *parts: str) -> str:
    """Return a whole page. The lead is the main result in one sentence."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><header>"
        f'<h1>{escape(title)}</h1><p class="lead">{_joined(lead)}</p></header>\n<main>'
        + "\n".join(parts)
        + "</main></body></html>\n"
    )


def _joined(words: str) -> str:
    """Escape, and keep a number on one line with its unit."""
    return re.sub(r"(\d) (?=[a-zµ%]{1,3}\b)", "\\1&nbsp;", escape(words))


def section(title: str, *parts: str, anchor: str | None = None) -> str:
    """Return a titled part. Charts in it are side by side where there is room."""
    name = f' id="{escape(anchor)}"' if anchor else ""
    body, figures = [], []
    for part in parts:
        if part.startswith("<figure"):
            figures.append(part)
            continue
        body += _row_of_charts(figures)
        figures = []
        body.append(part)
    body += _row_of_charts(figures)
    return f"<section{name}><h2>{escape(title)}</h2>\n{''.join(body)}</section>"


def _row_of_charts(figures: Sequence[str]) -> list[str]:
    return [f'<div class="charts">{"".join(figures)}</div>\n'] if figures else []


def links(targets: Mapping[str, str]) -> str:
    """Return links to the parts of this page: a text for each anchor."""
    links = "".join(f'<a href="#{escape(at)}">{escape(text)}</a>' for at, text in targets.items())
    return f'<nav aria-label="Parts of this page">{links}</nav>'


def warning(text: str) -> str:
    """Return a prominent line."""
    return f'<p class="warn" role="note">{escape(text)}</p>'


def text(words: str) -> str:
    """Return a paragraph."""
    return f"<p>{escape(words)}</p>"


def cards(given: Sequence[Card]) -> str:
    """Return cards of figures."""
    items = "".join(
        f"<div><dt>{escape(card.name)}</dt><dd>{escape(card.value)}</dd>"
        + (f'<dd class="than">{escape(card.than)}</dd>' if card.than else "")
        + "</div>"
        for card in given
    )
    return f'<dl class="cards">{items}</dl>'


def facts(given: Mapping[str, str]) -> str:
    """Return names and values."""
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in given.items()
    )
    return f'<dl class="facts">{items}</dl>'


def notes(lines: Sequence[str]) -> str:
    """Return a list of sentences."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """Return a table, which scrolls where it is too wide. Columns of numbers are aligned right."""
    is_text = [at == 0 or any(_is_text(row[at]) for row in rows) for at in range(len(head))]
    top = "".join(
        f'<th scope="col"{" class=x" if words else ""}>{escape(cell)}</th>'
        for cell, words in zip(head, is_text, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, is_text[at]) for at, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    label = escape(name)
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{label}"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: str, words: bool) -> str:
    kind = (" class=w" if len(cell) > _LONG else " class=x") if words else ""
    return f"<td{kind}>{escape(cell)}</td>"


def _is_text(cell: str) -> bool:
    return bool(cell) and not (cell[0].isdigit() or cell[0] in "-+.≥<±")


def hidden(title: str, *parts: str) -> str:
    """Return parts that are collapsed until the title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def chart(drawn: Chart) -> str:
    """Return a chart with its legend and its values as a collapsed table."""
    note = f"<small>{escape(drawn.note)}</small>" if drawn.note else ""
    caption = f"<figcaption>{escape(drawn.title)}{note}</figcaption>"
    if not drawn.has_values:
        return f"<figure>{caption}<p>There is no value to draw.</p></figure>"
    head, rows = values(drawn)
    folded = hidden("The values as a table", table(head, rows, drawn.title))
    return f"<figure>{caption}{svg(drawn)}{_key(drawn)}{folded}</figure>"


def _key(drawn: Chart) -> str:
    if isinstance(drawn, LineChart):
        items = [f"{swatch(line.color, line)}{escape(line.name)}" for line in drawn.lines]
    else:
        items = [f"{swatch(at)}{escape(name)}" for at, name in enumerate(drawn.series)]
        items += [f"| {escape(drawn.limit)}"] if drawn.limit else []
        items += [f"&#8212; {escape(drawn.spread)}"] if drawn.spread else []
    return f'<ul class="key">{"".join(f"<li>{item}</li>" for item in items)}</ul>' if items else ""
