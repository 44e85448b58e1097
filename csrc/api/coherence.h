/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Bytes and caches by address, the CPU's features, CRC-32C, crash points (beluga/primitives).
 */
#ifndef BL_API_COHERENCE_H
#define BL_API_COHERENCE_H

#include <stddef.h>
#include <stdint.h>
#include "api/error.h"

enum bl_cpu_feature {
    BL_CPU_CLFLUSHOPT = 1,
    BL_CPU_CLWB = 2,
    BL_CPU_SSE42 = 4,           /* the crc32 instruction */
    BL_CPU_AVX2 = 8,
    BL_CPU_AVX512 = 16,         /* F, with the operating system saving its state */
    BL_CPU_MOVDIR64B = 32,
    BL_CPU_PCLMUL = 64,
    BL_CPU_VPCLMUL = 128,       /* four carry-less products at once; implies AVX512 */
    BL_CPU_ENQCMD = 256,        /* to a device's shared queue */
    BL_CPU_WAITPKG = 512        /* to sleep until a line is written */
};

/* Features found and not taken away. */
uint32_t bl_cpu_features(void);

/* Take away every feature that is not in mask; ~0 gives all back. Before pools are opened. */
void bl_cpu_limit(uint32_t mask);

/* The streaming path in use: "sse2", "avx2", "avx512" or "movdir64b". */
const char *bl_copy_isa(void);

/* Copy round the cache: whole lines by non-temporal stores, a ragged head and tail by plain stores
 * that are flushed. Ends with a store fence. */
void bl_ntstore_copy(void *target, const void *source, size_t size);

/* Write dirty lines back; whether they stay cached depends on the CPU. No fence. */
void bl_flush(const void *address, size_t size);

/* Write back and drop, between full fences: the loads that follow go to memory. */
void bl_drop(const void *address, size_t size);

void bl_fence(void);

/* CRC-32C of bytes, seed 0 or the result for those before. */
uint32_t bl_crc32c(uint32_t seed, const void *bytes, size_t size);

/* End this process when it passes a point for the passage-th time from now on; stop: stop it,
 * once. At a point of a line: when the words of the line that have a bit in words are out, and no
 * others. name NULL: never. 0, or -ENOENT: no such point, or -EINVAL: it is no point of a line. */
int bl_crash_arm(const char *name, uint32_t passage, int stop, uint32_t words);

#endif
