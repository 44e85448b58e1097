/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Copies with a CRC, and copies out of the pool, on top of the architecture's streaming copy
 * (x86_copy.c, aarch64_copy.c).
 */
#include "coherence/copy.h"
#include "api/coherence.h"

#include <string.h>

#include "coherence/crc32c_isa.h"
#include "coherence/instructions.h"

/* Without a combined instruction path, a piece is copied, and then its CRC is computed while it is
 * in the first-level cache. */
enum { BL_COPY_PIECE_SIZE = 4 << 10 };

uint32_t bl_copy_stream_crc(uint32_t seed, void *target, const void *source, size_t size)
{
    if (bl_crc_is_wide(size))
        return ~bl_crc_wide_stream(~seed, target, source, size);
    uint8_t *to = target;
    const uint8_t *from = source;
    for (size_t piece; size > 0; to += piece, from += piece, size -= piece) {
        piece = size < BL_COPY_PIECE_SIZE ? size : BL_COPY_PIECE_SIZE;
        seed = bl_crc32c(seed, from, piece);
        bl_copy_stream(to, from, piece);
    }
    return seed;
}

uint32_t bl_copy_crc(uint32_t seed, void *target, const void *source, size_t size)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    if (bl_crc_is_wide(size)) {
        size_t whole = size & ~(size_t)(BL_LINE_SIZE - 1);
        seed = ~bl_crc_wide_copy(~seed, to, from, whole);
        to += whole, from += whole, size -= whole;
    }
    for (size_t piece; size > 0; to += piece, from += piece, size -= piece) {
        piece = size < BL_COPY_PIECE_SIZE ? size : BL_COPY_PIECE_SIZE;
        memcpy(to, from, piece);
        bl_copied_to(to);
        seed = bl_crc32c(seed, to, piece);
    }
    return seed;
}

static void bl_copy_near(void *target, const void *source, size_t size, uint32_t *crc)
{
    if (crc != NULL)
        *crc = bl_copy_crc(*crc, target, source, size);
    else
        memcpy(target, source, size);
}

/* Without the wide path the CRC is computed from the copy, so the copy uses the cache. */
void bl_copy_out(void *target, const void *source, size_t size, uint32_t *crc,
                 enum bl_copy_how how)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    size_t head = -(uintptr_t)to & (BL_LINE_SIZE - 1);
    size_t lines = size > head ? (size - head) & ~(size_t)(BL_LINE_SIZE - 1) : 0;
    if (how == BL_COPY_CACHED || lines == 0 || (crc != NULL && !bl_crc_is_wide(lines))) {
        bl_copy_near(to, from, size, crc);
        return;
    }
    bl_copy_near(to, from, head, crc);
    if (crc != NULL)
        *crc = bl_copy_stream_crc(*crc, to + head, from + head, lines);
    else
        bl_copy_stream(to + head, from + head, lines);
    bl_copy_near(to + head + lines, from + head + lines, size - head - lines, crc);
}

void bl_copy_settle(void) { bl_settle_now(); }
