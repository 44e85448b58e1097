/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Streaming copy by whole lines: one load, one store each.
 */
#include "coherence/coherence.h"

__attribute__((target("avx512f"))) static void bl_copy_avx512(uint8_t *target,
                                                              const uint8_t *source, size_t size)
{
    for (const uint8_t *end = source + size; source < end;
         source += BL_LINE_SIZE, target += BL_LINE_SIZE)
        bl_nt64(target, _mm512_loadu_si512(source));
}
