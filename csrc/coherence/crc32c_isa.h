/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C by the instructions of one architecture. All functions take and return a CRC without the
 * inversions at its start and end.
 */
#ifndef BL_CRC32C_ISA_H
#define BL_CRC32C_ISA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Return 1 if a CPU with these features has an instruction for CRC-32C. */
int bl_crc_has_instruction(uint32_t features);
uint32_t bl_crc_by_instruction(uint32_t crc, const uint8_t *bytes, size_t size, uint32_t features);
/* Compute the CRCs of four messages of size bytes, each stride bytes after the previous one. */
void bl_crc_four_by_instruction(uint32_t crc[4], const uint8_t *bytes, size_t stride, size_t size);

/* Return 1 if this CPU can combine the CRC with the copy, and size is large enough for that to pay
 * off. */
int bl_crc_is_wide(size_t size);
/* size is a multiple of 64, and at least 256. */
uint32_t bl_crc_wide_stay(uint32_t crc, const uint8_t *source, size_t size);
uint32_t bl_crc_wide_copy(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size);
uint32_t bl_crc_wide_stream(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size);

static inline uint64_t bl_crc_word(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

#endif
