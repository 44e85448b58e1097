/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C (Castagnoli, reflected) of blocks and of long messages, by the instructions of this CPU
 * (coherence/crc32c_isa.h), or else by a table.
 */
#include "api/coherence.h"
#include "coherence/crc32c.h"
#include "coherence/crc32c_isa.h"

static uint32_t bl_crc_table[8][256]; /* [k][b]: CRC of byte b, then k zero bytes */

__attribute__((constructor)) static void bl_crc_table_fill(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (0x82f63b78u & -(crc & 1));
        bl_crc_table[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = bl_crc_table[k - 1][byte];
            bl_crc_table[k][byte] = (crc >> 8) ^ bl_crc_table[0][crc & 0xff];
        }
}

static uint32_t bl_crc_plain(uint32_t crc, const uint8_t *bytes, size_t size)
{
    for (; size >= 8; bytes += 8, size -= 8) {
        uint64_t word = bl_crc_word(bytes) ^ crc;
        crc = 0;
        for (int k = 7; k >= 0; k--, word >>= 8)
            crc ^= bl_crc_table[k][word & 0xff];
    }
    for (; size > 0; bytes++, size--)
        crc = (crc >> 8) ^ bl_crc_table[0][(crc ^ *bytes) & 0xff];
    return crc;
}

uint32_t bl_crc32c(uint32_t seed, const void *bytes, size_t size)
{
    uint32_t features = bl_cpu_features(), crc = ~seed;
    const uint8_t *next = bytes;
    if (bl_crc_is_wide(size)) {
        size_t whole = size & ~(size_t)63;
        crc = bl_crc_wide_stay(crc, next, whole);
        next += whole, size -= whole;
    }
    if (bl_crc_has_instruction(features))
        return ~bl_crc_by_instruction(crc, next, size, features);
    return ~bl_crc_plain(crc, next, size);
}

void bl_crc32c_each(uint32_t *crc, const void *bytes, size_t stride, size_t size, uint32_t count)
{
    const uint8_t *next = bytes;
    uint32_t i = 0;
    if (bl_crc_has_instruction(bl_cpu_features()))
        for (; i + 4 <= count; i += 4, next += 4 * stride) {
            for (int k = 0; k < 4; k++)
                crc[i + k] = ~crc[i + k];
            bl_crc_four_by_instruction(&crc[i], next, stride, size);
            for (int k = 0; k < 4; k++)
                crc[i + k] = ~crc[i + k];
        }
    for (; i < count; i++, next += stride)
        crc[i] = bl_crc32c(crc[i], next, size);
}
