# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A reader returns the bytes that it has checked, however the compiler translates the loads; and
how waits nap and yield, in virtual time.
"""

import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# ---- A reader returns the bytes that it has checked, however the compiler translates the loads.


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


# ---- The rules of coherence/wait.h, on a core that another thread also uses. Naps and yields
# are counted in virtual time, so a busy machine has no influence.


SECONDS = 10
SLICE_S = 3e-3  # in which a computing thread runs after a yield

Waits = Callable[..., dict[str, float]]
"""Returns the figures of waited.c. ``napped`` is the share of the waits with a nap."""


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Waits:
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("needs gcc")
    program = tmp_path_factory.mktemp("waited") / "waited"
    flags = ["-std=gnu11", "-O1", "-w", "-DBL_FORMAT_HASH=0ull", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, str(HERE / "waited.c"), "-o", str(program)], check=True)

    def run(*, period_us: int, burst_us: int, reply_us: int = 60) -> dict[str, float]:
        command = [str(program), *map(str, (period_us, burst_us, reply_us, SECONDS))]
        words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        found = dict(zip(words[::2], map(float, words[1::2]), strict=True))
        assert found["waits"] > 1000
        return found | {"napped": found["napped"] / found["waits"]}

    return run


def test_waits_on_a_free_core_have_no_naps(waits: Waits) -> None:
    found = waits(period_us=1000, burst_us=0)
    assert found["napped"] == 0, found
    assert found["delay_ns"] < 1000, found


@pytest.mark.parametrize("burst_us", [100, 300, 900])
def test_a_thread_that_runs_now_and_then_does_not_keep_waits_napping(
    waits: Waits, burst_us: int
) -> None:
    """The server's publisher of events runs for a part of each 30 ms. A core that counted as taken
    for a second after each of its runs halved the rate of puts (bench events).
    """
    found = waits(period_us=30_000, burst_us=burst_us)
    assert found["runs"] > 0.9 * SECONDS / 30e-3, found
    assert found["napped"] < 0.6, found


def test_waits_beside_a_computing_thread_rarely_yield_to_it(waits: Waits) -> None:
    """Each yield gives it a whole time slice. Without naps it would run nearly all the time."""
    found = waits(period_us=10_000, burst_us=10_000)
    assert found["runs"] * SLICE_S < 0.1 * SECONDS, found
    assert found["napped"] > 0.9, found
