#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Copies the sources to TREE and compiles the C core there for aarch64 (scripts/dev/setup-aarch64).

Arguments: TREE, the folder of Python's headers, and the root with the C library. A file is copied
only if it differs, and a file without a source is removed. An extension is compiled only if its
sources have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/native")]

from beluga import _build  # noqa: E402
from bench import _build_limit  # noqa: E402


def _build_sim() -> ModuleType:
    """Return tests/native/build_sim.py, which only a whole checkout has."""
    import build_sim

    return build_sim


EXTENSIONS = {
    "beluga/_core": _build.core,
    "tests/native/_sim": lambda: _build_sim().builder("native._sim", ROOT / "csrc"),
    "bench/_limit": _build_limit.limit,
}
CC = "aarch64-linux-gnu-gcc"
FLAGS = ("-shared", "-fPIC", "-DPy_LIMITED_API=0x030a0000", "-Werror")


def names() -> list[str]:
    """Return the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def copy(tree: Path) -> None:
    """Make the tree's files equal to the sources."""
    wanted = set(names())
    for path in [path for path in tree.rglob("*") if path.is_file()]:
        name = str(path.relative_to(tree))
        made = path.suffix in (".so", ".pyc") or ".stamp" in path.name or name.startswith("build/")
        if not made and name not in wanted:
            path.unlink(missing_ok=True)  # tests may run there
    for name in wanted:
        source, target = ROOT / name, tree / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    installed = tree / "beluga_bench"  # the name that setup.py installs bench/ under
    if not installed.is_symlink():
        installed.symlink_to("bench")


def compile_all(tree: Path, headers: Path, root: Path) -> None:
    """Compile each extension whose sources have changed."""
    for name, builder in EXTENSIONS.items():
        ffi = builder()
        made = tree / "build" / f"{Path(name).name}.c"
        made.parent.mkdir(exist_ok=True)
        ffi.emit_c_code(str(made))
        options = dict(ffi._assigned_source[3])
        inputs = [made, Path(__file__), *map(Path, options["depends"])]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
        stamp = tree / f"{name}.stamp"
        if stamp.exists() and stamp.read_text() == digest:
            continue
        print(f"compiling {name} for aarch64", file=sys.stderr)
        macros = [f"-D{key}={value}" for key, value in options.get("define_macros", [])]
        folders = [*options["include_dirs"], str(headers), str(root / "usr/include")]
        command = [CC, f"--sysroot={root}", *FLAGS, *options["extra_compile_args"], *macros]
        command += [f"-I{folder}" for folder in folders]
        subprocess.run(
            [*command, str(made), "-o", str(tree / f"{name}.abi3.so"), "-lpthread"], check=True
        )
        stamp.write_text(digest)
    build_sim = _build_sim()
    stamp = tree / build_sim.STAMP.relative_to(ROOT)  # or the tests there would build it
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(build_sim.digest(tree))


def main() -> None:
    """Bring the tree up to date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("tree", "headers", "root"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    copy(given.tree)
    compile_all(given.tree, given.headers, given.root)


if __name__ == "__main__":
    main()
