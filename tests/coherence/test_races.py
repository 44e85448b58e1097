# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A reader returns the bytes that it has checked, however the compiler translates the loads.

``raced.c`` reads lines and payloads while another thread writes them. It is compiled with every
installed compiler. Clang may turn one plain load into two; GCC has not done so yet.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
ZIG = ROOT / "build/wheel-tools/ziglang/zig"  # scripts/dev/setup-wheel-tools
# With this CPU's own instruction set clang does the second load first, and no wrong copy passes the
# check. So the target is the baseline architecture.
TARGET = f"{platform.machine()}-linux-gnu"
COMPILERS = {
    "gcc": ["gcc"],
    "clang": ["clang"],
    "zig": [str(ZIG), "cc", "-target", TARGET],
}
MUTANT_S = 30.0

LOAD = '__asm__ volatile("movdqa %1, %0" : "=x"(value) : "m"(*source));'
PLAIN_LOAD = "value = _mm_load_si128(source);"


def build(compiler: str, level: str, sources: Path, folder: Path) -> Path:
    command = COMPILERS[compiler]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {compiler}")
    program = folder / f"raced{level}"
    flags = ["-std=gnu11", level, "-w", "-DBL_FORMAT_HASH=0ull", f"-I{sources}"]
    subprocess.run(
        [*command, *flags, str(HERE / "raced.c"), "-o", str(program), "-lpthread"], check=True
    )
    return program


def differing(program: Path) -> dict[str, int]:
    """Return how many copies of lines and of payloads were not what had been checked."""
    output = subprocess.run(
        [program], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    words = output.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("level", ["-O1", "-O2"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_checked_bytes_are_the_copied_bytes(compiler: str, level: str, tmp_path: Path) -> None:
    program = build(compiler, level, CSRC, tmp_path)
    assert differing(program) == {"lines": 0, "payloads": 0}


@pytest.mark.slow
def test_a_plain_load_is_detected(tmp_path: Path) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the mutant is one of x86.h")
    sources = tmp_path / "csrc"
    shutil.copytree(CSRC, sources)
    header = sources / "coherence/x86.h"
    text = header.read_text()
    assert LOAD in text
    header.write_text(text.replace(LOAD, PLAIN_LOAD))
    program = build("zig", "-O1", sources, tmp_path)
    until = time.monotonic() + MUTANT_S
    while differing(program)["lines"] == 0:
        assert time.monotonic() < until, "two loads of one line were not noticed"
