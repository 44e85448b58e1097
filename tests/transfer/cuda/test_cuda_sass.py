# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The kernels as NVRTC compiles them for three generations of GPUs, and their machine code."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
from cuda_scene import KERNELS

from beluga.transfer.cuda.nvrtc import Nvrtc

# ---- Compiles the kernels by NVRTC without a GPU, and reads the machine code.


@dataclasses.dataclass
class Kernel:
    """One kernel's machine code."""

    registers: int
    instructions: list[str]  # including predicates

    def named(self, pattern: str) -> list[str]:
        return [text for text in self.instructions if re.search(pattern, text)]

    def loads_ahead(self) -> int:
        """The most 128-bit loads, not predicated, between two stores or branches."""
        best = count = 0
        for text in self.instructions:
            if re.search(r"\b(STG|BRA|EXIT)\b", text):
                count = 0
            elif re.match(r"LDG\S*\.128\b", text):
                count += 1
                best = max(best, count)
        return best


def disassembled(folder: Path, cubin: Path) -> dict[str, Kernel]:
    """Return the kernels of a cubin, by nvdisasm of ``scripts/dev/setup-cuda-tools``."""
    listing = subprocess.run(
        [next(folder.glob("nvidia/*/bin/nvdisasm")), cubin],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    registers = re.findall(
        r"EIATTR_REGCOUNT\n.*?index@\((\w+)\)\n.*?\.word\s+(0x\w+)", listing, re.DOTALL
    )
    bodies = re.split(r"^\.text\.(\w+):$", listing, flags=re.MULTILINE)
    code = {
        name: re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:\{\s*)?(.*?)\s*;", body)
        for name, body in zip(bodies[1::2], bodies[2::2], strict=True)
    }
    return {name: Kernel(int(count, 16), code[name]) for name, count in registers}


# ---- The kernels as NVRTC compiles them for three generations of GPUs, and their machine code.


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
    folder = Path(found.stdout.strip())
    cubin = tmp_path_factory.mktemp("cubin") / "kv_copy.cubin"
    nvrtc = Nvrtc(str(next(folder.glob("nvidia/*/lib/libnvrtc.so.*"))))
    cubin.write_bytes(nvrtc.compile(f"sm_{request.param}"))
    return disassembled(folder, cubin)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_launched_kernel_is_compiled(kernels: dict[str, Kernel]) -> None:
    assert set(kernels) == set(KERNELS)
    assert all(len(kernel.instructions) > 100 for kernel in kernels.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_words_are_16_bytes_and_enough_are_in_flight(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        assert kernel.loads_ahead() >= UNROLL, name
        assert len(kernel.named(r"\bSTG\S*\.128\b")) >= UNROLL, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_register_is_spilled(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        assert kernel.named(r"\b(LDL|STL)\b") == [], name
        assert kernel.registers <= REGISTERS_MAX, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hints_are_the_requested_ones(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        loads, stores = kernel.named(r"\bLDG\S*\.128\b"), kernel.named(r"\bSTG\S*\.128\b")
        assert all("NA" in text and "CONSTANT" in text for text in loads), name
        assert all(("EF" in text) == name.startswith("bl_gather") for text in stores), name
        assert kernel.named("STRONG.SYS") == [], name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_only_checksums_are_reduced_over_lanes_and_nothing_is_atomic(
    kernels: dict[str, Kernel],
) -> None:
    for name, kernel in kernels.items():
        assert kernel.named(r"\b(ATOM|ATOMG|RED|REDG)\b") == [], name
        assert bool(kernel.named(r"\bREDUX\b")) == name.endswith("_sum"), name
