/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C by carry-less products of 512 bits, alone or of bytes that are being copied.
 */
#ifndef BL_CRC32C_WIDE_H
#define BL_CRC32C_WIDE_H

#include <stddef.h>
#include <stdint.h>

/* Does this CPU have what it takes, and is it worthwhile for so many bytes? */
int bl_crc_is_wide(size_t size);
/* These return the CRC without the inversions at its begin and end. size is a multiple of 64, and
 * at least 256. */
uint32_t bl_crc_wide_stay(uint32_t crc, const uint8_t *source, size_t size);
uint32_t bl_crc_wide_copy(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size);
uint32_t bl_crc_wide_stream(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size);

#endif
