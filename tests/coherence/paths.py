# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Every path that can be forced on a CPU: the features to leave enabled, and those that it must
have.
"""

import platform

from beluga._ffi import lib

VECTORS = lib.BL_CPU_AVX2 | lib.BL_CPU_AVX512 | lib.BL_CPU_VPCLMUL
ALL = 0xFFFFFFFF

COPY_PATHS = {
    "plain": (0, 0),
    "sse2": (ALL & ~(VECTORS | lib.BL_CPU_MOVDIR64B), 0),
    "movdir64b": (ALL & ~VECTORS, lib.BL_CPU_MOVDIR64B),
    "avx2": (ALL & ~(lib.BL_CPU_AVX512 | lib.BL_CPU_VPCLMUL), lib.BL_CPU_AVX2),
    "avx512": (ALL, lib.BL_CPU_AVX512),
}
FLUSH_PATHS = {
    "clflush": (ALL & ~(lib.BL_CPU_CLFLUSHOPT | lib.BL_CPU_CLWB), 0),
    "clflushopt": (ALL & ~lib.BL_CPU_CLWB, lib.BL_CPU_CLFLUSHOPT),
    "clwb": (ALL, lib.BL_CPU_CLWB),
}
CRC_PATHS = {
    "plain": (0, 0),
    "single": (lib.BL_CPU_SSE42, lib.BL_CPU_SSE42),
    "lanes": (lib.BL_CPU_SSE42 | lib.BL_CPU_PCLMUL, lib.BL_CPU_SSE42 | lib.BL_CPU_PCLMUL),
    "wide": (ALL, lib.BL_CPU_VPCLMUL),
}
if platform.machine() == "aarch64":
    COPY_PATHS = {"plain": (0, 0), "neon": (lib.BL_CPU_NEON, lib.BL_CPU_NEON)}
    FLUSH_PATHS = {"civac": (ALL, 0)}
    CRC_PATHS = {"plain": (0, 0), "crc32": (lib.BL_CPU_CRC32, lib.BL_CPU_CRC32)}
