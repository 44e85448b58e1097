# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Private memory of this process, near or on a chosen NUMA node, for comparison with a pool's."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from beluga.errors import BelugaError

from .region import touch

_SET_MEMPOLICY = 238  # the number of the system call on x86-64
_POLICY_DEFAULT, _POLICY_BIND = 0, 2


@contextmanager
def private(size: int, node: int | None = None, *, shared: bool = False) -> Iterator[int]:
    """Yield the address of ``size`` bytes of anonymous memory. Raises BelugaError if the node
    refuses.

    ``shared`` memory can be mapped a second time.
    """
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    memory = mmap.mmap(-1, size, flags=kind | mmap.MAP_ANONYMOUS)
    view = (ctypes.c_char * size).from_buffer(memory)
    try:
        if node is not None:
            _set_policy(_POLICY_BIND, 1 << node)
        touch(ctypes.addressof(view), size)
        yield ctypes.addressof(view)
    finally:
        if node is not None:
            _set_policy(_POLICY_DEFAULT, 0)
        del view
        memory.close()


def _set_policy(policy: int, mask: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    nodes = ctypes.c_ulong(mask)
    pointer = ctypes.byref(nodes) if mask else None
    if libc.syscall(_SET_MEMPOLICY, policy, pointer, ctypes.c_ulong(64 if mask else 0)) != 0:
        raise BelugaError(f"no memory of that NUMA node: {os.strerror(ctypes.get_errno())}")
