# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A flush flushes its argument's address: on an inaccessible page, the fault has this address. On a
coherent machine nothing else distinguishes a correct flush from one of another address, such as
that of the pointer.
"""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from beluga._ffi import lib

pytestmark = pytest.mark.skipif(
    platform.machine() == "aarch64",
    reason="qemu-user's dc touches no memory; test_instructions.py has its addresses",
)

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


@pytest.mark.parametrize("choice", ["bl_flush", "bl_drop"])
@pytest.mark.parametrize("offset", [0, 64, 1000, 4095])
def test_a_flush_faults_at_its_argument(flush_path: str, choice: str, offset: int) -> None:
    fault = int(fault_of(choice, offset, 1, lib.bl_cpu_features()))
    assert fault // 64 == offset // 64


@pytest.mark.parametrize("choice", ["bl_flush", "bl_drop"])
def test_an_empty_flush_touches_no_line(flush_path: str, choice: str) -> None:
    assert fault_of(choice, 100, 0, lib.bl_cpu_features()) == "no fault"


def test_copy_stores_at_the_given_address(copy_path: str) -> None:
    fault = int(fault_of("copy", 128, 64, lib.bl_cpu_features()))
    assert 128 <= fault < 192
