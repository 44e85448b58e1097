/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Streaming copies on aarch64: 32 bytes at a time, or 16 without NEON (which only bl_cpu_limit
 * disables). The stores of a line are adjacent.
 */
#ifdef __aarch64__

#include <string.h>

#include "api/coherence.h"
#include "coherence/copy_isa.h"
#include "coherence/instructions.h"

static void bl_copy_pairs(uint8_t *target, const uint8_t *source, size_t size)
{
    for (const uint8_t *end = source + size; source < end;
         source += BL_LINE_SIZE, target += BL_LINE_SIZE)
        bl_line_stream(target, source);
}

static void bl_copy_neon(uint8_t *target, const uint8_t *source, size_t size)
{
    for (const uint8_t *end = source + size; source < end;
         source += BL_LINE_SIZE, target += BL_LINE_SIZE) {
        uint8x16_t a = vld1q_u8(source), b = vld1q_u8(source + 16);
        uint8x16_t c = vld1q_u8(source + 32), d = vld1q_u8(source + 48);
        bl_stnp32(target, a, b);
        bl_stnp32(target + 32, c, d);
    }
}

void bl_copy_stream(void *target, const void *source, size_t size)
{
    if (bl_cpu_features() & BL_CPU_NEON)
        bl_copy_neon(target, source, size);
    else
        bl_copy_pairs(target, source, size);
}

const char *bl_copy_isa(void) { return bl_cpu_features() & BL_CPU_NEON ? "neon" : "stnp"; }

#endif
