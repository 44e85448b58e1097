#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""check_packages.py WHEEL SDIST: check the contents of both before an upload (``scripts/release``).

Prints each error on one line; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "setup.py", "csrc/beluga.c")
PLACES = [str(folder).encode() for folder in (ROOT, Path(sys.base_prefix))]


def wrong_in_wheel(path: Path) -> Iterator[str]:
    """Yield the errors in a wheel."""
    if "-cp310-abi3-manylinux_" not in path.name:
        yield f"{path.name} is for one Python or one Linux; build it by scripts/wheels"
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        for name in names:
            if name.startswith("tests/") or "_sim." in name:
                yield f"{name} is only for tests; leave it out of the wheel"
            if any(place in wheel.read(name) for place in PLACES):
                yield f"{name} names a folder of this machine"
        python = {str(file.relative_to(ROOT)) for file in (ROOT / "beluga").rglob("*.py")}
        for name in sorted(python - set(names)):
            yield f"{name} is missing in the wheel"
        if not any(name.endswith("METADATA") for name in names):
            yield "the wheel has no METADATA"


def wrong_in_sdist(path: Path) -> Iterator[str]:
    """Yield the errors in a source distribution."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in MEMBERS:
        if name not in names:
            yield f"{name} is missing in the source distribution"
    for name in sorted(names):
        if name.endswith((".so", ".o", ".pyc")):
            yield f"{name} was built; leave it out of the source distribution"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("sdist", type=Path)
    options = parser.parse_args()
    found = [*wrong_in_wheel(options.wheel), *wrong_in_sdist(options.sdist)]
    for line in found:
        print(line)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
