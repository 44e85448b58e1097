/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Primitives that take addresses: cache control, copies, the CPU's features, CRC-32C, crash points
 * (beluga/coherence).
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
    BL_CPU_VPCLMUL = 128,       /* four carry-less products per instruction; implies AVX512 */
    BL_CPU_ENQCMD = 256,        /* submission to a device's shared queue */
    BL_CPU_WAITPKG = 512,       /* umwait: sleep until a line is written */
    BL_CPU_NEON = 1024,         /* aarch64 only, like the next one */
    BL_CPU_CRC32 = 2048         /* the crc32c instructions */
};

/* Return the features of this CPU that are not disabled. */
uint32_t bl_cpu_features(void);

/* Disable every feature that is not in mask; ~0 enables all again. Call it before pools are
 * opened. */
void bl_cpu_limit(uint32_t mask);

/* Return the streaming path in use: "sse2", "avx2", "avx512" or "movdir64b"; on aarch64 "neon" or
 * "stnp". */
const char *bl_copy_isa(void);

/* Copy past the cache: whole lines by non-temporal stores, an unaligned head and tail by plain
 * stores and flushes. A store fence completes the copy. */
void bl_ntstore_copy(void *target, const void *source, size_t size);

/* Write dirty lines back, without a fence; whether they stay cached depends on the CPU. */
void bl_flush(const void *address, size_t size);

/* Write back and invalidate, between full fences: the loads that follow read memory. */
void bl_drop(const void *address, size_t size);

void bl_fence(void);

/* Return the CRC-32C of bytes; seed is 0 or the result for the bytes before. */
uint32_t bl_crc32c(uint32_t seed, const void *bytes, size_t size);

/* Kill this process when it passes a crash point for the passage-th time, counted from now; with
 * stop, stop it (SIGSTOP) once instead. words is for a point before a line is published: only the
 * words of the line whose bits are set reach memory. With name NULL, no point is armed. Returns 0;
 * -ENOENT: no such point; or -EINVAL: words is set, but no line is published at the point. */
int bl_crash_arm(const char *name, uint32_t passage, int stop, uint32_t words);

#endif
