# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The last row of tiers-disk alone.

``python -m beluga_bench.system.tiers_rebuild DIR RESULTS`` measures the rebuild of the index on the
disk of a folder, and puts its row into a file of results.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..harness.options import Options
from ..harness.recorded import read_record, write_record
from .tiers_disk import rebuild_row


def main(folder: str, target: str) -> None:
    """Measure, and replace the row of an earlier run."""
    row = rebuild_row(Options(disk=folder))
    row["command"] = "python -m beluga_bench.system.tiers_rebuild DIR RESULTS"
    file = Path(target)
    rows = read_record(file) if file.exists() else []
    rows = [other for other in rows if other["case"] != row["case"]] + [row]
    write_record(file, rows)
    print(f"{row['note']}; ratio {row['ratio_to_limit']}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
