/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Streaming copy by 16 bytes: what every x86-64 has. A line's four stores stand together, so that
 * its write-combining buffer is full before another one is begun.
 */
#include "coherence/coherence.h"

static void bl_copy_sse2(uint8_t *target, const uint8_t *source, size_t size)
{
    for (const uint8_t *end = source + size; source < end;
         source += BL_LINE_SIZE, target += BL_LINE_SIZE) {
        const __m128i *from = (const __m128i *)source;
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        bl_nt16(target, a);
        bl_nt16(target + 16, b);
        bl_nt16(target + 32, c);
        bl_nt16(target + 48, d);
    }
}
