/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Streaming copy by 32 bytes. A line's two stores stand together.
 */
#include "coherence/coherence.h"

__attribute__((target("avx2"))) static void bl_copy_avx2(uint8_t *target, const uint8_t *source,
                                                         size_t size)
{
    for (const uint8_t *end = source + size; source < end;
         source += BL_LINE_SIZE, target += BL_LINE_SIZE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)source);
        __m256i b = _mm256_loadu_si256((const __m256i *)(source + 32));
        bl_nt32(target, a);
        bl_nt32(target + 32, b);
    }
}
