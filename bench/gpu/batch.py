# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""cuMemcpyBatchAsync, a peer that Beluga does not use: many copies in one call.

It is called by ctypes, with the signature of CUDA 12.8, whose symbol drivers keep.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from beluga.transfer.cuda import DriverError

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class MemcpyBatch:
    """Prepare copies of ``size`` bytes each, (target, source); raise OSError without a CUDA
    driver.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], size: int) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        try:
            self._call = library.cuMemcpyBatchAsync
        except AttributeError:
            raise DriverError("this CUDA driver has no cuMemcpyBatchAsync (12.8)") from None
        self._count = len(pairs)
        words = ctypes.c_uint64 * self._count
        self._targets, self._sources = (words(*column) for column in zip(*pairs, strict=True))
        self._sizes = words(*[size] * self._count)
        self._attributes, self._first = _Attributes(order=_IN_STREAM_ORDER), ctypes.c_size_t(0)

    def start(self, stream: int) -> None:
        """Enqueue them on a stream other than the default one. Raises DriverError."""
        failed = ctypes.c_size_t(0)
        status = self._call(
            self._targets,
            self._sources,
            self._sizes,
            ctypes.c_size_t(self._count),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )
        if status:
            raise DriverError(f"cuMemcpyBatchAsync: status {status} at copy {failed.value}")
