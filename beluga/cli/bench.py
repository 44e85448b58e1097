# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga bench``, also ``cxl-rpc bench``, and its report as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beluga.choices import BENCHES
from beluga.cli.frame import Argument, BadParameter, Legend, Option, explains
from beluga.cli.options import (
    Json,
    Wide,
    among,
    check_output,
    naming_devices,
    open_pool,
    write_whole,
)
from beluga.cli.output import origin, print_json, print_note, print_table
from beluga.errors import BelugaError

if TYPE_CHECKING:
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
        content = beluga_bench.load(path)
        if isinstance(content, list):
            rows += content
        else:
            recorded.append(content)
    provenance = origin()
    _write(
        target,
        beluga_bench.Results(
            rows=rows,
            source=f"recorded in {', '.join(path.name for path in sources)}; nothing was run",
            machine={"Page made by": provenance["Command"], "Page made on": provenance["Date"]},
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
    runs = beluga_bench.run(beluga_bench.BENCHES, names, options)
    rows: list[beluga_bench.Row] = runs.rows
    missing, ended = runs.missing, runs.ended
    if rows or ended is None:
        provenance = origin()
        facts = {**machine, "Command": provenance["Command"], "Date": provenance["Date"]}
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


Smoke = Annotated[
    bool,
    Option("--smoke", help=("Run for a few seconds only, to check that everything works.")),
]
Scratch = Annotated[
    list[str] | None,
    Option(
        "--pool",
        metavar="PATH",
        help="A device of a pool to overwrite. Repeat the option for each device.",
    ),
]
Coherence = Annotated[
    str | None,
    Option(words=("software", "hardware"), help="The pool's coherence. Default: software."),
]


_COLUMNS = {
    "case": ("case", "the measured operation"),
    "engine": ("engine", "the copy engine: cpu, dsa or cuda"),
    "peer": ("peer", "another library that does the same"),
    "crc": ("crc", "whether checksums are computed"),
    "fragment_bytes": ("fragment", "the size of each fragment of an operation, in bytes"),
    "fragments": ("fragments", "the number of fragments of an operation"),
    "bytes": ("bytes", "the size of each operation"),
    "depth": ("depth", "the number of concurrent operations"),
    "threads": ("threads", "the number of threads"),
    "p50_ns": ("p50 ns", "the median time of an operation, in nanoseconds"),
    "p99_ns": ("p99 ns", "the 99th percentile of an operation's time, in nanoseconds"),
    "blocks": ("blocks", "the number of blocks in the pool"),
    "ops_per_s": ("ops/s", "operations per second"),
    "keys_per_s": ("keys/s", "keys per second"),
    "gb_per_s": ("GB/s", "1e9 bytes per second"),
    "limit": ("limit", "the machine's own limit, measured at the same time, in the same unit"),
    "ratio_to_limit": ("ratio", "the speed relative to the limit; 1 is as fast as the limit"),
    "ratio_to_peer": ("ratio to peer", "the speed relative to the peer's; more than 1 is faster"),
    "paper": ("paper", "the paper's result on a real CXL switch"),
}
LEGEND = Legend(_COLUMNS.values())
_SHARED = ("engine", "crc", "fragment_bytes", "fragments", "bytes", "depth", "threads")
# The columns that a narrow table drops, in this order.
_SPARE = ("paper", "p99_ns", "limit", "ratio_to_peer", "ops_per_s", "p50_ns")


@explains(LEGEND)
def bench(
    names: Annotated[list[str], Argument(completes=among(*BENCHES, "all", REPORT))],
    smoke: Smoke = False,
    pool: Scratch = None,
    coherence: Coherence = None,
    pace: str | None = None,
    threads: Annotated[int | None, Option(min=1)] = None,
    disk: str | None = None,
    out: Path | None = None,
    sources: Annotated[list[Path] | None, Option("--from")] = None,
    save: bool = False,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Measure this machine's memory and a pool in it, relative to the machine's own limit.

    NAME...: The benchmarks, or all; see docs/understand/benchmarks.md. report (by itself, or before
        the names of some) runs them and writes one HTML page.
    --pace: Throttle devices, such as device=22.5GB/s,latency=650ns.
    --threads: The largest number of threads in bandwidth and copy.
    --disk DIR: A folder on the disk to measure; default: the current one.
    --out PAGE: The page that report writes. Default: beluga-bench.html.
    --from FILE...: Make the page of report from these results (JSON), without running anything.
    --save: With copy: write to beluga.toml from how many bytes on each copy engine is faster than
        the CPU.
    """
    import beluga_bench

    page = names[0] == REPORT
    if not page and (out is not None or sources):
        raise BadParameter("--out and --from need beluga bench report; add report")
    if page and sources:
        report_files([*sources, *map(Path, names[1:])], out, json=json)
        return
    names = (names[1:] or ["all"]) if page else names
    chosen = list(beluga_bench.BENCHES) if names == ["all"] else names
    if unknown := [name for name in chosen if name not in beluga_bench.BENCHES]:
        choices = ", ".join([*beluga_bench.BENCHES, "all"])
        raise BadParameter(f"there is no benchmark '{unknown[0]}'; choose one of {choices}")
    if save and "copy" not in chosen:
        raise BadParameter("--save needs the benchmark copy; add copy")
    given = {"pool": pool, "coherence": coherence, "pace": pace, "threads": threads, "disk": disk}
    for name, value in given.items():
        if value and not any(name in beluga_bench.USES[bench] for bench in chosen):
            those = ", ".join(bench for bench, uses in beluga_bench.USES.items() if name in uses)
            raise BadParameter(f"{', '.join(chosen)} does not use --{name}; remove it ({those} do)")
    if disk and not Path(disk).is_dir():
        raise BadParameter(f"--disk {disk} is not a folder; name one")
    if pool:
        open_pool(pool).close()  # refuse wrong devices before anything runs
    options = beluga_bench.Options(
        smoke=smoke,
        pool=tuple(pool) if pool else None,
        coherence=coherence,
        pace=pace,
        threads=threads,
        disk=disk,
        progress=print_note,
    )
    with naming_devices():
        rows = report_run(chosen, options, out) if page else _run(chosen, options, wide, json=json)
    if page and json:
        print_json(rows)
    if save:
        path = beluga_bench.save_crossings(options)
        none = "only the CPU copies host memory here; nothing was saved"
        print_note(none if path is None else f"wrote the table [copy] of {path}")


@explains(LEGEND)
def rpc(
    smoke: Smoke = False,
    pool: Scratch = None,
    coherence: Coherence = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Measure calls, relative to a bare exchange of cache lines."""
    bench(["rpc"], smoke, pool, coherence, wide=wide, json=json)


def _run(
    names: Sequence[str], options: beluga_bench.Options, wide: bool, *, json: bool
) -> list[beluga_bench.Row]:
    """Run benchmarks, and print the rows of each when it ends, or all of them as JSON. Completed
    rows are also printed after an error or an interruption.

    Raises BelugaError if a benchmark failed.
    """
    import beluga_bench

    show = partial(_show, wide=wide)
    runs = beluga_bench.run(beluga_bench.BENCHES, names, options, finished=None if json else show)
    rows: list[beluga_bench.Row] = runs.rows
    if json:
        print_json(rows)
    if runs.ended is not None:
        print_note(f"interrupted: these are the {len(rows)} completed rows")
        raise runs.ended
    if runs.missing:
        raise BelugaError(
            f"{', '.join(runs.missing)} failed; the {len(rows)} completed rows are printed"
        )
    return rows


def _show(rows: Sequence[Mapping[str, object]], *, wide: bool) -> None:
    """Print a table for each benchmark and kind of memory, with the fields that any row has, then
    the notes. Fields with equal values in all rows are in the title.
    """
    for name, group in groupby(rows, lambda row: (row["bench"], row["memory"], row["coherence"])):
        table = list(group)
        fields = [field for field in _COLUMNS if any(row[field] is not None for row in table)]
        common = [
            field
            for field in fields
            if field in _SHARED and len(table) > 1 and len({row[field] for row in table}) == 1
        ]
        title = [str(part) for part in name if part is not None]
        title += [f"{_COLUMNS[field][0]} {table[0][field]}" for field in common]
        shown = [field for field in fields if field not in common]
        print_table(
            LEGEND,
            [[row[field] for field in shown] for row in table],
            columns=[_COLUMNS[field][0] for field in shown],
            title=", ".join(title),
            spare=[_COLUMNS[field][0] for field in _SPARE],
            wide=wide,
        )
        for row in table:
            if row["note"] is not None:
                print_note(f"  {row['case']}: {row['note']}")
