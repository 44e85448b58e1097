# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Streaming copies, flushes, fences and CRC-32C for a program's memory (``csrc/coherence/``).

They work on any contiguous buffer: a mapping, a numpy array, a bytearray. Users of a pool need not
call them, because the pool's verbs do this. They are for tools, tests and measurements.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias, cast

from beluga._ffi import core, ffi, lib

if TYPE_CHECKING:
    import numpy as np
    import typing_extensions
    from numpy.typing import NDArray

Memory: TypeAlias = "typing_extensions.Buffer | NDArray[np.generic]"
"""Contiguous memory: the buffer protocol, which numpy declares for Python 3.12 and later only."""

__all__ = ["crc32c", "features", "fence", "flush", "invalidate", "isa", "ntstore_copy"]

_FEATURES = {
    "clflushopt": lib.BL_CPU_CLFLUSHOPT,
    "clwb": lib.BL_CPU_CLWB,
    "sse4.2": lib.BL_CPU_SSE42,
    "avx2": lib.BL_CPU_AVX2,
    "avx512": lib.BL_CPU_AVX512,
    "movdir64b": lib.BL_CPU_MOVDIR64B,
    "pclmul": lib.BL_CPU_PCLMUL,
    "vpclmul": lib.BL_CPU_VPCLMUL,
    "enqcmd": lib.BL_CPU_ENQCMD,
    "waitpkg": lib.BL_CPU_WAITPKG,
    "neon": lib.BL_CPU_NEON,
    "crc32": lib.BL_CPU_CRC32,
}


def _bytes_of(buffer: Memory, what: str, *, writable: bool = False) -> core.char_p:
    """Return the buffer's memory for C. Raises TypeError or ValueError about ``what``."""
    try:
        view = memoryview(cast("typing_extensions.Buffer", buffer))
    except TypeError:
        kind = type(buffer).__name__
        raise TypeError(f"the {what} is a {kind}; give bytes, an array or a mapping") from None
    if not view.c_contiguous:
        raise ValueError(f"the {what} is not contiguous; give a contiguous copy")
    if "O" in re.sub(":[^:]*:", "", view.format):  # the format without the names of fields
        raise TypeError(f"the {what} holds Python's objects; give an array of numbers")
    if writable and view.readonly:
        raise ValueError(f"the {what} is read-only; give a writable buffer")
    return ffi.from_buffer("char[]", view)


def ntstore_copy(target: Memory, source: Memory) -> None:
    """Copy ``source`` over ``target``, of the same size, past the cache, and fence the stores.

    Whole lines are streamed; an unaligned head and tail are stored and flushed. The two must not
    overlap. Raises ValueError (the sizes differ, or the target is read-only) or TypeError (not a
    buffer).
    """
    with (
        _bytes_of(target, "target", writable=True) as into,
        _bytes_of(source, "source") as out_of,
    ):
        if len(into) != len(out_of):
            raise ValueError(f"the target has {len(into)} bytes, the source {len(out_of)}")
        lib.bl_ntstore_copy(into, out_of, len(into))


def flush(buffer: Memory) -> None:
    """Write the buffer's dirty lines back to memory. A :func:`fence` completes it."""
    with _bytes_of(buffer, "buffer") as lines:
        lib.bl_flush(lines, len(lines))


def invalidate(buffer: Memory) -> None:
    """Drop the buffer's lines from this host's caches, so that the next loads read memory. A fence
    is included.

    A dirty line is written back first, over anything that another host has stored there since.
    """
    with _bytes_of(buffer, "buffer") as lines:
        lib.bl_drop(lines, len(lines))


def fence() -> None:
    """Finish all earlier loads, stores and flushes of this thread before any later one."""
    lib.bl_fence()


def crc32c(data: Memory, seed: int = 0) -> int:
    """Return the CRC-32C of ``data``. ``seed`` is the CRC of the bytes before it."""
    with _bytes_of(data, "data") as seen:
        return int(lib.bl_crc32c(seed, seen, len(seen)))


def features() -> frozenset[str]:
    """Return the CPU features that Beluga uses, without those that BELUGA_ISA and BELUGA_FLUSH
    exclude.
    """
    found = lib.bl_cpu_features()
    return frozenset(name for name, bit in _FEATURES.items() if found & bit)


def isa() -> str:
    """Return the name of the streaming copy: ``sse2``, ``avx2``, ``avx512`` or ``movdir64b``; on
    aarch64 ``neon`` or ``stnp``.
    """
    return str(ffi.string(lib.bl_copy_isa()).decode())
