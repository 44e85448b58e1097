/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C by carry-less products of 512 bits, alone or of bytes that are being copied.
 */
#ifndef BL_CRC32C_WIDE_H
#define BL_CRC32C_WIDE_H

#include <stddef.h>
#include <stdint.h>

/* The instruction sets of functions with the crc32 instruction. Clang counts it as one of its own;
 * for GCC it is a part of SSE 4.2, and GCC 10 knows no other name. */
#ifdef __clang__
#define BL_CRC_TARGET "sse4.2,crc32"
#else
#define BL_CRC_TARGET "sse4.2"
#endif

/* Does this CPU have what it takes, and is it worthwhile for so many bytes? */
int bl_crc_is_wide(size_t size);
/* These return the CRC without the inversions at its begin and end. size is a multiple of 64, and
 * at least 256. */
uint32_t bl_crc_wide_stay(uint32_t crc, const uint8_t *source, size_t size);
uint32_t bl_crc_wide_copy(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size);
uint32_t bl_crc_wide_stream(uint32_t crc, uint8_t *target, const uint8_t *source, size_t size);

#endif
