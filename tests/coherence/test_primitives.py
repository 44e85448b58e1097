# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The primitives on buffers, by every path of this CPU: copies, flushes and their addresses,
CRC-32C.
"""

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import CRC_PATHS
from support.commands import captured
from support.refusals import Refusal, refusals

from beluga import coherence
from beluga._ffi import lib

# ---- The primitives on buffers, by every path of this CPU.


PLAINEST = "stnp" if platform.machine() == "aarch64" else "sse2"

AROUND_LINES = [
    *(0, 1, 2, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257, 511),
    *(4095, 4161),
]
# test_instructions.py has its addresses.
needs_faults = pytest.mark.skipif(
    platform.machine() == "aarch64", reason="qemu-user's dc touches no memory"
)


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


FROZEN = np.frombuffer(b"abc", np.uint8)


@refusals(
    (
        lambda: coherence.ntstore_copy(bytearray(4), b"abc"),
        ValueError,
        "the target has 4 bytes, the source 3",
    ),
    (lambda: coherence.ntstore_copy(b"abc", b"abc"), ValueError, "the target is read-only"),
    (lambda: coherence.ntstore_copy(FROZEN, b"abc"), ValueError, "the target is read-only"),
    (lambda: coherence.flush(np.zeros(8)[::2]), ValueError, "the buffer is not contiguous"),
    (lambda: coherence.flush([1, 2]), TypeError, "the buffer is a list"),
)
def test_buffers_of_other_kinds_are_refused(refusal: Refusal) -> None:
    refusal()


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return captured([sys.executable, "-c", program], env={**os.environ, **environment})


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


# ---- CRC-32C: published values, and every path against every other.


# RFC 3720, B.4, and the check value of the catalogues.
PUBLISHED = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "value"), PUBLISHED)
def test_checksums_match_published_values(crc_path: str, data: bytes, value: int) -> None:
    assert coherence.crc32c(data) == value


def by_bits(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    "size", [1, 7, 8, 255, 256, 257, 319, 320, 383, 384, 400, 3071, 3072, 7001]
)
def test_checksums_match_the_bitwise_definition(crc_path: str, size: int) -> None:
    data = bytes(i * 7 % 251 for i in range(size))
    assert coherence.crc32c(data) == by_bits(data)


@given(
    st.binary(max_size=600).flatmap(lambda seed: st.just((seed * 16)[:9000])),
    st.integers(0, 63),
    st.integers(0, 9000),
)
def test_all_paths_return_the_same_checksum_and_can_continue_one(
    data: bytes, start: int, cut: int
) -> None:
    data, before = data[start:], lib.bl_cpu_features()
    values = set()
    try:
        for mask, _ in CRC_PATHS.values():
            lib.bl_cpu_limit(mask)
            values.add(coherence.crc32c(data))
            values.add(coherence.crc32c(data[cut:], coherence.crc32c(data[:cut])))
    finally:
        lib.bl_cpu_limit(before)
    assert len(values) == 1


# ---- A flush flushes its argument's address: on an inaccessible page, the fault has this
# address. On a coherent machine nothing else distinguishes a correct flush from one of another
# address, such as that of the pointer.


PROGRAM = """
import ctypes, mmap, os, sys
from beluga._ffi import ffi, lib

choice, offset, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_size_t(4096), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1,
                 ctypes.c_long(0))

@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def caught(number, info, context):
    address = ctypes.c_uint64.from_address(info + 16).value  # siginfo_t.si_addr
    os.write(1, str(address - page).encode())
    os._exit(0)

SA_SIGINFO, SIGSEGV = 4, 11
action = (ctypes.c_uint64 * 32)(ctypes.cast(caught, ctypes.c_void_p).value)
ctypes.c_int.from_buffer(action, 8 + 128).value = SA_SIGINFO  # handler, mask, flags
libc.sigaction(SIGSEGV, action, None)

lib.bl_cpu_limit(int(sys.argv[4]))
address = ffi.cast("void *", page + offset)
if choice == "copy":
    lib.bl_ntstore_copy(address, ffi.from_buffer(bytes(size)), size)
else:
    getattr(lib, choice)(address, size)
os.write(1, b"no fault")
"""


def fault_of(choice: str, offset: int, size: int, mask: int) -> str:
    command = [sys.executable, "-c", PROGRAM, choice, str(offset), str(size), str(mask)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_faults
@pytest.mark.parametrize("choice", ["bl_flush", "bl_drop"])
@pytest.mark.parametrize("offset", [0, 64, 1000, 4095])
def test_a_flush_faults_at_its_argument(flush_path: str, choice: str, offset: int) -> None:
    fault = int(fault_of(choice, offset, 1, lib.bl_cpu_features()))
    assert fault // 64 == offset // 64


@needs_faults
@pytest.mark.parametrize("choice", ["bl_flush", "bl_drop"])
def test_an_empty_flush_touches_no_line(flush_path: str, choice: str) -> None:
    assert fault_of(choice, 100, 0, lib.bl_cpu_features()) == "no fault"


@needs_faults
def test_copy_stores_at_the_given_address(copy_path: str) -> None:
    fault = int(fault_of("copy", 128, 64, lib.bl_cpu_features()))
    assert 128 <= fault < 192
