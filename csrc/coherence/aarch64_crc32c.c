/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C by the crc32c instructions of aarch64, alone or combined with a copy.
 *
 * The instruction takes 8 bytes and has a latency of two or three cycles, in which a copy stores
 * the bytes. Each word is loaded once, so the checksum is that of the stored bytes.
 */
#ifdef __aarch64__

#include <arm_acle.h>

#include "api/coherence.h"
#include "coherence/crc32c_isa.h"
#include "coherence/instructions.h"

#define BL_WITH_CRC __attribute__((target("+crc")))

BL_WITH_CRC static inline uint32_t bl_crc_step(uint32_t crc, uint64_t word)
{
    return __crc32cd(crc, word);
}

int bl_crc_has_instruction(uint32_t features) { return (features & BL_CPU_CRC32) != 0; }

BL_WITH_CRC uint32_t bl_crc_by_instruction(uint32_t crc, const uint8_t *bytes, size_t size,
                                             uint32_t features)
{
    (void)features;
    for (; size >= 8; bytes += 8, size -= 8)
        crc = bl_crc_step(crc, bl_crc_word(bytes));
    for (; size > 0; bytes++, size--)
        crc = __crc32cb(crc, *bytes);
    return crc;
}

void bl_crc_four_by_instruction(uint32_t crc[4], const uint8_t *bytes, size_t stride, size_t size)
{
    for (int i = 0; i < 4; i++) /* the CPU overlaps the four chains */
        crc[i] = bl_crc_by_instruction(crc[i], bytes + (size_t)i * stride, size, 0);
}

/* How the bytes are stored while the CRC is computed. */
enum bl_crc_move { BL_CRC_COPY, BL_CRC_STREAM };

BL_WITH_CRC __attribute__((always_inline)) static inline uint32_t
bl_crc_moved(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size,
             enum bl_crc_move move)
{
    for (size_t at = 0; at < size; at += 16) {
        uint64_t low = bl_load8_once(source + at), high = bl_load8_once(source + at + 8);
        if (move == BL_CRC_STREAM) {
            bl_stnp16(target + at, low, high);
        } else {
            memcpy(target + at, &low, sizeof low);
            memcpy(target + at + 8, &high, sizeof high);
        }
        crc = bl_crc_step(bl_crc_step(crc, low), high);
    }
    return crc;
}

int bl_crc_is_wide(size_t size)
{
    return size >= 256 && bl_crc_has_instruction(bl_cpu_features());
}

uint32_t bl_crc_wide_stay(uint32_t crc, const uint8_t *source, size_t size)
{
    return bl_crc_by_instruction(crc, source, size, 0);
}

BL_WITH_CRC uint32_t bl_crc_wide_copy(uint32_t crc, uint8_t *target, const uint8_t *source,
                                        size_t size)
{
    return bl_crc_moved(crc, target, source, size, BL_CRC_COPY);
}

BL_WITH_CRC uint32_t bl_crc_wide_stream(uint32_t crc, uint8_t *target, const uint8_t *source,
                                          size_t size)
{
    return bl_crc_moved(crc, target, source, size, BL_CRC_STREAM);
}

#endif
