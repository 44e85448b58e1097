# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Builds ``native._sim``: the C core over the verbs of the simulator, and the doubles of devices.

It also exports the core's pure structures, so that models can be compared with them. ``python
tests/native/build_sim.py`` builds it if a source has changed since.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cffi import FFI

NATIVE = Path(__file__).resolve().parent
TESTS = NATIVE.parent
ROOT = TESTS.parent
SIM = TESTS / "sim" / "native"
TARGET = NATIVE / "_sim.abi3.so"
BUILD = ROOT / "build" / "native"
STAMP = BUILD / "stamp"

# Most headers are of csrc/, relative to it.
HEADERS = (
    *("dsa/execute.h", NATIVE / "dsa_soft.h", "space/pages.h", "space/victims.h"),
    *("space/extent.h", "index/evict.h", "index/pins.h", "index/tasks.h", SIM / "sim.h"),
)


def builder(name: str, csrc: Path, *flags: str) -> FFI:
    """Return the builder of such an extension, with the core of the folder ``csrc``."""
    from beluga import _build

    folders = (csrc, TESTS)
    # Sites are named by a path below csrc/ or tests/.
    names = [f"-fmacro-prefix-map={folder}/=" for folder in folders]
    headers = (*_build.CORE_HEADERS, *_build.QUEUE_HEADERS, *HEADERS)
    # -O1 compiles in half the time and makes runs slower by a few percent.
    return _build.builder(name, headers, "sim/native/simulator.c", folders, (*names, *flags))


def compiled(ffi: FFI, target: Path, scratch: Path) -> None:
    """Compile the extension for this Python or a later one. Raises CalledProcessError."""
    scratch.mkdir(parents=True, exist_ok=True)
    source = scratch / f"{target.name.partition('.')[0]}.c"
    ffi.emit_c_code(str(source))
    options = ffi._assigned_source[3]
    command = shlex.split(os.environ.get("CC") or "cc")
    command += ["-shared", "-fPIC", "-DPy_LIMITED_API=0x030a0000", *options["extra_compile_args"]]
    command += [f"-D{name}={value}" for name, value in options["define_macros"]]
    folders = [*options["include_dirs"], sysconfig.get_path("include")]
    command += [f"-I{folder}" for folder in folders]
    draft = scratch / target.name
    subprocess.run([*command, str(source), "-o", str(draft), "-lpthread", "-lm"], check=True)
    draft.replace(target)


def digest(root: Path = ROOT) -> str:
    """Return a digest of the sources."""
    found = hashlib.sha256()
    for folder in ("csrc", "tests/sim/native", "tests/native"):
        for path in sorted((root / folder).rglob("*.[ch]")):
            found.update(path.read_bytes())
    for name in ("beluga/_build.py", "tests/native/build_sim.py"):
        found.update((root / name).read_bytes())
    return found.hexdigest()


def update() -> None:
    """Build the extension, unless it is that of the sources."""
    wanted = digest()
    if _is_built(wanted):
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_built(wanted):
            return  # by another process, meanwhile
        STAMP.unlink(missing_ok=True)
        compiled(builder("native._sim", ROOT / "csrc", "-O1"), TARGET, BUILD)
        STAMP.write_text(wanted)


def _is_built(wanted: str) -> bool:
    return TARGET.exists() and STAMP.exists() and STAMP.read_text() == wanted


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    update()
