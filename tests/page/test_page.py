# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Pages and charts: escaping, axes, and the picture's agreement with the page."""

import re

import pytest
from page.well_formed import Page

from beluga import page
from beluga.page.chart import scale_of

HOSTILE = "</svg><script src=//x>alert('1')</script>\"&"


def bars(*values: float | None, log: bool = False, label: str = "a") -> page.BarChart:
    axis = page.Axis("time", log=log, show=page.seconds)
    groups = [page.BarGroup(f"{label}{at}", [page.Bar(v)]) for at, v in enumerate(values)]
    return page.BarChart(title=label, axis=axis, groups=groups)


def lines(
    *points: tuple[float, float | None], log: bool = False, name: str = "l"
) -> page.LineChart:
    axis = page.Axis("x", log=log)
    return page.LineChart(
        title=name, x=axis, y=page.Axis("y", log=log), lines=[page.Line(name, points)]
    )


def test_every_part_escapes_its_input() -> None:
    parts = [
        page.warning(HOSTILE),
        page.text(HOSTILE),
        page.cards([page.Card(HOSTILE, HOSTILE, HOSTILE)]),
        page.facts({HOSTILE: HOSTILE}),
        page.notes([HOSTILE]),
        page.table([HOSTILE], [[HOSTILE]], HOSTILE),
        page.hidden(HOSTILE, page.text(HOSTILE)),
        page.chart(bars(1.0, 2.0, label=HOSTILE)),
        page.chart(lines((1, 2), (2, 3), name=HOSTILE)),
        page.chart(bars(None, label=HOSTILE)),
    ]
    source = page.page(HOSTILE, HOSTILE, page.section(HOSTILE, *parts, anchor="one"),
                       page.links({"one": HOSTILE}))  # fmt: skip
    read = Page(source)
    assert "<script" not in source
    assert read.texts["h1"] == [HOSTILE] and read.texts["title"][0] == HOSTILE
    assert HOSTILE in read.texts["td"]


def test_a_bar_is_as_long_as_its_share_of_the_axis() -> None:
    drawn = page.chart(bars(1.0, 2.0, 4.0))
    widths = [
        float(width)
        for width in re.findall(r'<rect class="b s0" x="4"[^>]* width="([\d.]+)"', drawn)
    ]
    assert widths[2] == pytest.approx(2 * widths[1], abs=0.2)
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert [label for label in ("1 s", "2 s", "4 s") if f">{label}</text>" in drawn] == [
        "1 s",
        "2 s",
        "4 s",
    ]


def test_a_missing_value_has_a_text_and_no_bar() -> None:
    drawn = page.chart(bars(1.0, None))
    assert drawn.count('<rect class="b') == 1
    assert "no value" in drawn
    nothing = page.chart(bars(None))
    assert "<svg" not in nothing and "no value to draw" in nothing


def test_a_gap_in_a_line_is_not_drawn_over() -> None:
    drawn = page.chart(lines((0, 1), (1, 1), (2, None), (3, 1), (4, 1)))
    [path] = re.findall(r'<path class="l s0" d="([^"]*)"/>', drawn.split("</svg>", maxsplit=1)[0])
    assert path.count("M") == 2
    alone = page.chart(lines((0, 1), (1, None), (2, 3)))
    assert 'class="l' not in alone.split("</svg>", maxsplit=1)[0]  # two single points


@pytest.mark.parametrize(
    ("values", "log", "low", "high"),
    [
        ([3.0, 17.0], False, 0, 20),
        ([0.0], False, 0, 1),
        ([], False, 0, 1),
        ([1e-9, 2e-9], False, 0, 2e-9),
        ([2.0, 30.0], True, 1, 100),
        ([10.0], True, 10, 100),
        ([1.0, 1e12], True, 1, 1e12),
    ],
)
def test_an_axis_has_room_for_all_values_and_few_round_ticks(
    values: list[float], log: bool, low: float, high: float
) -> None:
    scale = scale_of(page.Axis("", log=log), values)
    assert (scale.low, scale.high) == (pytest.approx(low), pytest.approx(high))
    assert 2 <= len(scale.ticks) <= 8
    assert all(0 <= scale.position(value) <= 1 for value in [*values, *scale.ticks])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (2.6e-9, "2.6 ns"), (81e-6, "81 us"), (0.0123, "12.3 ms"), (1.44, "1.44 s"),
     (90, "90 s"), (150, "2.5 min"), (7200, "120 min"), (0.99999, "1 s")],
)  # fmt: skip
def test_times_have_three_digits_and_a_unit(value: float, text: str) -> None:
    assert page.seconds(value) == text


def test_counts_and_bytes_have_units() -> None:
    assert page.quantity(13_700_000, "") == "13.7 M"
    assert page.quantity(29e6, "/s") == "29 M/s"
    assert page.quantity(12, "/s") == "12/s"
    assert page.quantity(9_999, "/s") == "9,999/s"
    assert page.quantity(10_000, "/s") == "10 k/s"
    assert page.quantity(895_000, "/s") == "895 k/s"
    assert (page.percent(0.253), page.plain(12_345.6), page.plain(0.01234)) == (
        "25.3 %", "12,346", "0.0123",
    )  # fmt: skip


def test_a_chart_has_its_values_in_a_table() -> None:
    read = Page(page.page("t", "l", page.section("s", page.chart(lines((1, 2.5), (2, None))))))
    assert read.texts["td"] == ["1", "2.5"]
    assert read.texts["th"] == ["x", "l"]
