#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prints the files and lines of each folder, and the difference from the last record.

The record is scripts/dev/lines.txt; ``--record`` writes it anew. A change that adds lines gives the
reason in the body of its commit, with what it takes out.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("lines.txt")
FOLDERS = ("beluga", "csrc", "tests", "bench", "scripts", "docs")
BINARY = {".png", ".xz", ".gz"}


class Size(NamedTuple):
    files: int
    lines: int


def sizes() -> dict[str, Size]:
    """Return the size of each folder: the tracked files, without pictures and archives."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *FOLDERS],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    texts = [path for path in paths if path.suffix not in BINARY and path.is_file()]
    return {
        folder: Size(len(own), sum(path.read_bytes().count(b"\n") for path in own))
        for folder in FOLDERS
        for own in [[path for path in texts if path.relative_to(ROOT).parts[0] == folder]]
    }


def recorded() -> dict[str, Size]:
    rows = [line.split() for line in RECORD.read_text(encoding="utf-8").splitlines()]
    return {folder: Size(int(files), int(lines)) for folder, files, lines in rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write the record anew")
    options = parser.parse_args()
    now, before = sizes(), recorded() if RECORD.exists() else {}
    if options.record:
        rows = [f"{folder} {size.files} {size.lines}\n" for folder, size in now.items()]
        RECORD.write_text("".join(rows), encoding="utf-8")
    for folder, (files, lines) in now.items():
        old = before.get(folder, Size(files, lines))
        more = f"{files - old.files:+} files, {lines - old.lines:+} lines"
        print(f"{folder:8} {files:4} files, {lines:6} lines ({more})")


if __name__ == "__main__":
    main()
