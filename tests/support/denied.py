#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``denied.py ERRNO NAME[,NAME...] COMMAND...``: run a command in which the kernel fails system
calls with an errno, as an older kernel (ENOSYS) or a container's profile (EPERM) does.

A seccomp filter of x86-64, which children inherit. ``populate`` is madvise() with an advice of
Linux 5.14 or later, ``hugepage`` one that kernels without transparent huge pages lack.
"""

import ctypes
import os
import struct
import sys

CALLS = {
    "pidfd_open": 434, "pidfd_send_signal": 424, "io_uring_setup": 425, "getrandom": 318,
    "sched_setaffinity": 203, "membarrier": 324, "openat2": 437, "close_range": 436, "statx": 332,
    "copy_file_range": 326, "memfd_create": 319, "mbind": 237, "clone3": 435, "faccessat2": 439,
}  # fmt: skip
_MADVISE, _HUGEPAGE, _POPULATE_READ = 28, 14, 22
_LOAD, _EQUAL, _GREATER, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARGUMENT_AT = 0, 32  # in struct seccomp_data: nr, and the low half of args[2]
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2


def program(number: int, names: list[str]) -> bytes:
    """Return the filter. A step is (code, steps to skip if true, if false, operand)."""
    refuse = (_RETURN, 0, 0, _ERRNO | number)
    steps = [(_LOAD, 0, 0, _NUMBER_AT)]
    for name in names:
        if name in CALLS:
            steps += [(_EQUAL, 0, 1, CALLS[name]), refuse]
    if "populate" in names:
        steps += [
            (_EQUAL, 0, 3, _MADVISE),
            (_LOAD, 0, 0, _ARGUMENT_AT),
            (_GREATER, 0, 1, _POPULATE_READ),
            refuse,
        ]
    if "hugepage" in names:
        steps += [
            (_LOAD, 0, 0, _NUMBER_AT),
            (_EQUAL, 0, 3, _MADVISE),
            (_LOAD, 0, 0, _ARGUMENT_AT),
            (_EQUAL, 0, 1, _HUGEPAGE),
            refuse,
        ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def deny(number: int, names: list[str]) -> None:
    """Install the filter in this process; it cannot be removed."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    code = program(number, names)
    steps = ctypes.create_string_buffer(code)
    what = Program(len(code) // 8, ctypes.addressof(steps))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER, ctypes.byref(what), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    deny(int(sys.argv[1]), sys.argv[2].split(","))
    os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606  the point of it
