# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``scripts/gpu bench``: write the rows of all benchmarks that have rows of a GPU into one file.

Of ``copy`` and ``bandwidth`` only the GPU's rows are measured; ``coherence`` and ``latency`` are
measured whole, because their GPU rows are compared with the CPU's. The file is rewritten after each
benchmark, so that measured rows are kept if the time runs out.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from beluga.child import run_program
from beluga.pool import Pool

from ..harness.ground import coherence_of, ground
from ..harness.machine import memory_of
from ..harness.options import Options
from ..harness.recorded import write_record
from ..harness.row import Recorder, Row
from ..paper.coherence import bench_coherence
from ..paper.latency import bench_latency
from .beside import gpu_beside
from .copy import gpu_copy
from .many import gpu_bandwidth


def _on_one_device(
    name: str, *parts: Callable[[Recorder, Pool], list[Row]]
) -> Callable[[Options], list[Row]]:
    """Run parts of a benchmark in a pool of one device."""

    def run(options: Options) -> list[Row]:
        with ground(options, devices=1) as pool:
            fixed: Row = {"memory": memory_of(pool), "coherence": coherence_of(pool), "depth": 1}
            return [row for part in parts for row in part(Recorder(name, options, fixed), pool)]

    return run


STAGES: dict[str, Callable[[Options], list[Row]]] = {
    "copy": _on_one_device("copy", gpu_copy, gpu_beside),
    "bandwidth": _on_one_device("bandwidth", gpu_bandwidth),
    "coherence": bench_coherence,
    "latency": bench_latency,
}


def measure(options: Options, target: Path, commit: str | None, gpu: str | None) -> list[str]:
    """Run all stages; return the names of those that failed, whose rows are not in ``target``.

    ``commit`` names the sources if they are not a checkout. ``gpu`` is added to each row's machine.
    """
    rows: list[Row] = []
    failed = []
    for name, stage in STAGES.items():
        try:
            measured = stage(options)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        for row in measured:
            row["commit"] = commit or row["commit"]
            row["machine"] = f"{row['machine']}, {gpu}" if gpu else row["machine"]
        rows += measured
        write_record(target, rows)
    return failed


def main() -> None:
    """Run the benchmarks; the exit status is 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="gpu_all", description=__doc__)
    parser.add_argument("target", type=Path, help="the file: rows as JSON")
    parser.add_argument("--commit", help="of these sources, where they are no checkout")
    parser.add_argument("--gpu", help="its name, for the rows")
    parser.add_argument("--smoke", action="store_true", help="in seconds: does it work")
    given = parser.parse_args()
    options = Options(smoke=given.smoke, progress=lambda text: print(text, file=sys.stderr))
    if failed := measure(options, given.target, given.commit, given.gpu):
        sys.exit(f"gpu_all: failed: {', '.join(failed)}")


if __name__ == "__main__":
    run_program(main)
