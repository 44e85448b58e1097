# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Charts of rows as PNG files, with matplotlib (``pip install 'beluga-kv[plot]'``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from beluga import page

from .charts import charts, remark
from .row import Row


def plot(rows: Iterable[Row], directory: Path) -> list[Path]:
    """Draw a picture for each benchmark in the rows. Returns the paths.

    Raises BelugaError without matplotlib, and OSError if the directory cannot be written.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row["bench"]), []).append(row)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for bench, own in found.items():
        if drawn := charts(own):
            paths.append(directory / f"{bench}.png")
            paths[-1].write_bytes(page.picture(title(bench, own), drawn))
    return paths


def title(bench: str, rows: list[Row]) -> str:
    """Return a title with the warnings and the origin of the figures."""
    notes = remark(rows)
    what = f"{bench} ({notes})" if notes else bench
    return f"{what}\n{rows[0]['machine']}, {rows[0]['commit']}"
