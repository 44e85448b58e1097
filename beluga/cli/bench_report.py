# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga bench report``: an HTML page of a benchmark run, or of recorded results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from beluga.cli.frame import BadParameter
from beluga.cli.options import check_output, write_whole
from beluga.cli.origin import origin
from beluga.cli.output import print_json, print_note
from beluga.errors import BelugaError

if TYPE_CHECKING:  # slow to import
    import beluga_bench

REPORT = "report"
_PAGE = Path("beluga-bench.html")


def report_files(sources: Sequence[Path], out: Path | None, *, json: bool) -> None:
    """Write a page of recorded results, without running anything."""
    import beluga_bench

    target = _target(out)
    rows: list[beluga_bench.Row] = []
    recorded: list[beluga_bench.Recorded] = []
    for path in sources:
        found = beluga_bench.load(path)
        if isinstance(found, list):
            rows += found
        else:
            recorded.append(found)
    made = origin()
    _write(
        target,
        beluga_bench.Results(
            rows=rows,
            source=f"recorded in {', '.join(path.name for path in sources)}; nothing was run",
            machine={"Page made by": made["Command"], "Page made on": made["Date"]},
            recorded=recorded,
        ),
    )
    if json:
        print_json(rows)


def report_run(
    names: Sequence[str], options: beluga_bench.Options, out: Path | None
) -> list[beluga_bench.Row]:
    """Run benchmarks and write a page of them. The page lists failed benchmarks, and those that
    were skipped after an interruption. Returns the rows.

    Raises BelugaError, after writing the page, if a benchmark failed.
    """
    import beluga_bench

    target = _target(out)
    machine = beluga_bench.facts()
    done = beluga_bench.run(beluga_bench.BENCHES, names, options)
    rows: list[beluga_bench.Row] = done.rows
    missing, ended = done.missing, done.ended
    if rows or ended is None:
        made = origin()
        facts = {**machine, "Command": made["Command"], "Date": made["Date"]}
        _write(
            target,
            beluga_bench.Results(
                rows=rows,
                source="measured by this command",
                machine=facts,
                missing=missing,
                recorded=beluga_bench.recorded_peers(),
            ),
        )
    if ended is not None:
        print_note(
            "interrupted" if rows else "interrupted before any benchmark was complete: no page"
        )
        raise ended
    if missing:
        raise BelugaError(f"{', '.join(missing)} failed; the page has the others")
    return rows


def _target(out: Path | None) -> Path:
    target = out or _PAGE
    if target.suffix != ".html":
        raise BadParameter(f"--out {str(target)!r} does not end with .html; give such a name")
    check_output(target)
    return target


def _write(target: Path, results: beluga_bench.Results) -> None:
    import beluga_bench

    write_whole(target, beluga_bench.report(results).encode())
    print_note(f"wrote {target}")
