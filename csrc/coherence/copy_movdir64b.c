/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Streaming copy by the instruction that moves a whole line from memory to memory.
 */
#include "coherence/coherence.h"

static void bl_copy_movdir64b(uint8_t *target, const uint8_t *source, size_t size)
{
    for (const uint8_t *end = source + size; source < end;
         source += BL_LINE_SIZE, target += BL_LINE_SIZE)
        bl_movdir64b(target, source);
}
