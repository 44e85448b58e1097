# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The primitives on buffers, by every path of this CPU."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from beluga import coherence
from beluga._ffi import lib

PLAINEST = "stnp" if platform.machine() == "aarch64" else "sse2"

AROUND_LINES = [
    0,
    1,
    2,
    15,
    16,
    63,
    64,
    65,
    127,
    128,
    129,
    191,
    192,
    255,
    256,
    257,
    511,
    4095,
    4161,
]


def page_aligned(size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


def counting(size: int) -> np.ndarray:
    """A period that is coprime to all powers of two shows bytes that are off by a line."""
    return (np.arange(size) % 251).astype(np.uint8)


@pytest.mark.parametrize("size", AROUND_LINES)
def test_copy_writes_only_the_target_bytes(copy_path: str, size: int) -> None:
    memory, source = page_aligned(8192), counting(4096 + 256)
    for target_offset in (0, 1, 7, 16, 63, 64, 65, 100):
        for source_offset in (0, 1, 8, 33):
            memory[:] = 253
            wanted = source[source_offset : source_offset + size]
            target = memory[target_offset : target_offset + size]
            coherence.ntstore_copy(target, wanted)
            assert np.array_equal(target, wanted)
            assert (memory[:target_offset] == 253).all()
            assert (memory[target_offset + size :] == 253).all()


def test_copy_moves_megabytes(copy_path: str) -> None:
    memory, source = page_aligned(3 << 20), counting((3 << 20) + 5)
    coherence.ntstore_copy(memory, source[5:])
    assert np.array_equal(memory, source[5:])


def test_a_forced_copy_path_is_used(copy_path: str) -> None:
    assert coherence.isa() == (PLAINEST if copy_path == "plain" else copy_path)


def test_flush_and_invalidate_keep_stored_bytes(flush_path: str) -> None:
    memory = page_aligned(8192)
    for start, end in ((0, 0), (0, 1), (3, 70), (64, 128), (1, 8191)):
        memory[:] = counting(8192)
        coherence.flush(memory[start:end])
        coherence.fence()
        coherence.invalidate(memory[start:end])
        assert np.array_equal(memory, counting(8192))


@pytest.mark.parametrize("copy_path", ["plain"], indirect=True)
def test_copies_work_with_only_sse2_and_clflush(copy_path: str) -> None:
    assert coherence.features() == frozenset()
    target = bytearray(1000)
    coherence.ntstore_copy(target, counting(1000))
    coherence.flush(target)
    coherence.invalidate(target)
    assert target == counting(1000).tobytes()
    assert coherence.crc32c(b"123456789") == 0xE3069283


def test_any_kind_of_mapping_works(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as mapping:
        coherence.ntstore_copy(mapping, bytes(range(256)) * 16)
        coherence.flush(mapping)
        coherence.invalidate(mapping)
    assert path.read_bytes() == bytes(range(256)) * 16
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        coherence.invalidate(mapping)


def test_copy_refuses_a_target_of_another_size() -> None:
    with pytest.raises(ValueError, match="the target has 4 bytes, the source 3"):
        coherence.ntstore_copy(bytearray(4), b"abc")


def test_copy_refuses_a_read_only_target() -> None:
    frozen = np.zeros(3, dtype=np.uint8)
    frozen.flags.writeable = False
    for target in (b"abc", frozen):
        with pytest.raises(ValueError, match="the target is read-only"):
            coherence.ntstore_copy(target, b"abc")


def test_a_buffer_that_is_not_contiguous_bytes_is_rejected() -> None:
    with pytest.raises(ValueError, match="the buffer is not contiguous"):
        coherence.flush(np.zeros(8)[::2])
    with pytest.raises(TypeError, match="the buffer is a list"):
        coherence.flush([1, 2])  # type: ignore[arg-type]


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("isa", ["sse2", "avx2", "avx512", "movdir64b", "neon", "stnp"])
def test_the_environment_forces_a_path_or_raises(isa: str) -> None:
    done = run_python("from beluga import coherence; print(coherence.isa())", BELUGA_ISA=isa)
    if isa in (PLAINEST, coherence.isa()) or isa in coherence.features():
        assert done.stdout.strip() == isa
    else:
        assert f"BELUGA_ISA={isa} is not possible on this CPU; set it to {PLAINEST}" in done.stderr


@pytest.mark.parametrize("flush", ["clflush", "clflushopt"])
def test_environment_forces_a_flush(flush: str) -> None:
    program = "from beluga import coherence; print(sorted(coherence.features()))"
    done = run_python(program, BELUGA_FLUSH=flush)
    if platform.machine() == "aarch64":
        assert f"BELUGA_FLUSH={flush} is not possible on this CPU; set it to civac" in done.stderr
        return
    if flush == "clflushopt" and flush not in coherence.features():
        pytest.skip("this CPU has no clflushopt")
    assert "clwb" not in done.stdout
    assert ("clflushopt" in done.stdout) == (flush == "clflushopt")


@pytest.mark.parametrize("variable", ["BELUGA_ISA", "BELUGA_FLUSH"])
def test_unknown_choice_in_the_environment_is_refused(variable: str) -> None:
    done = run_python("import beluga.coherence", **{variable: "fastest"})
    assert done.returncode != 0
    assert f"InstructionError: {variable}=fastest is not possible" in done.stderr.splitlines()[-1]


def test_every_feature_has_its_name() -> None:
    bits = [getattr(lib, name) for name in dir(lib) if name.startswith("BL_CPU_")]
    assert set(bits) == set(coherence._FEATURES.values())
