/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * CRC-32C of many short messages. The instruction has a latency of three cycles and a throughput of
 * one word per cycle, so several messages are processed in parallel.
 */
#ifndef BL_CRC32C_H
#define BL_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Compute the CRC-32C of count messages of size bytes, each stride bytes after the previous one.
 * crc[i] holds the seed of message i (see bl_crc32c) and receives its CRC. */
void bl_crc32c_each(uint32_t *crc, const void *bytes, size_t stride, size_t size, uint32_t count);

#endif
