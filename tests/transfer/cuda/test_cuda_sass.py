# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The kernels as NVRTC compiles them for three generations of GPUs, and their machine code.

The tests need no GPU: ``scripts/dev/setup-cuda-tools`` gets the compiler and the disassembler.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from nvrtc import Kernel, Nvrtc

from beluga.transfer.cuda import driver as source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
UNROLL = 8  # words in flight for each lane
REGISTERS_MAX = 128  # 512 threads of this size fill a multiprocessor
ARCHITECTURES = (80, 90, 100)


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda number: f"sm_{number}")
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Kernel]:
    setup = ROOT / "scripts" / "dev/setup-cuda-tools"
    found = subprocess.run([setup], capture_output=True, text=True, check=False)
    if found.returncode == 77:
        pytest.skip(found.stderr.strip())
    assert found.returncode == 0, found.stderr
    tools = Nvrtc(Path(found.stdout.strip()))
    cubin = tmp_path_factory.mktemp("cubin") / "kv_copy.cubin"
    cubin.write_bytes(tools.compile(request.param))
    return tools.kernels(cubin)


def test_every_launched_kernel_is_compiled(kernels: dict[str, Kernel]) -> None:
    assert set(kernels) == set(source.KERNELS)
    assert all(len(kernel.instructions) > 100 for kernel in kernels.values())


def test_words_are_16_bytes_and_enough_are_in_flight(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        assert kernel.loads_ahead() >= UNROLL, name
        assert len(kernel.named(r"\bSTG\S*\.128\b")) >= UNROLL, name


def test_no_register_is_spilled(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        assert kernel.named(r"\b(LDL|STL)\b") == [], name
        assert kernel.registers <= REGISTERS_MAX, name


def test_hints_are_the_requested_ones(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        loads, stores = kernel.named(r"\bLDG\S*\.128\b"), kernel.named(r"\bSTG\S*\.128\b")
        assert all("NA" in text and "CONSTANT" in text for text in loads), name
        assert all(("EF" in text) == name.startswith("bl_gather") for text in stores), name
        assert kernel.named("STRONG.SYS") == [], name


def test_only_checksums_are_reduced_over_lanes_and_nothing_is_atomic(
    kernels: dict[str, Kernel],
) -> None:
    for name, kernel in kernels.items():
        assert kernel.named(r"\b(ATOM|ATOMG|RED|REDG)\b") == [], name
        assert bool(kernel.named(r"\bREDUX\b")) == name.endswith("_sum"), name
