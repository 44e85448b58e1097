# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Pages and charts: one self-contained HTML file, with charts drawn as SVG.

A page needs no network, no script and no other file. It follows the reader's light or dark scheme.
"""

from beluga.page.chart import (
    Axis,
    Bar,
    BarChart,
    BarGroup,
    Chart,
    Line,
    LineChart,
    percent,
    plain,
    quantity,
    seconds,
)
from beluga.page.html import (
    Card,
    cards,
    chart,
    facts,
    hidden,
    links,
    notes,
    page,
    section,
    table,
    text,
    warning,
)

__all__ = [
    "Axis",
    "Bar",
    "BarChart",
    "BarGroup",
    "Card",
    "Chart",
    "Line",
    "LineChart",
    "cards",
    "chart",
    "facts",
    "hidden",
    "links",
    "notes",
    "page",
    "percent",
    "plain",
    "quantity",
    "seconds",
    "section",
    "table",
    "text",
    "warning",
]
