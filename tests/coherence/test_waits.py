# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rules of coherence/wait.h, on a core that another thread also uses. Naps and yields are
counted in virtual time, so a busy machine has no influence.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
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
