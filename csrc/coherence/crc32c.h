/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C of many short messages. The instruction answers after three cycles and takes a new word
 * in each, so the sums of several messages are made side by side.
 */
#ifndef BL_CRC32C_H
#define BL_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Compute the CRC-32C of count messages of size bytes, each stride bytes behind the one before.
 * crc[i] has the seed of message i (see bl_crc32c), and gets its CRC. */
void bl_crc32c_each(uint32_t *crc, const void *bytes, size_t stride, size_t size, uint32_t count);

#endif
