/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The pins of one session: which blocks it has pinned, and how often. Their number is bounded
 * (D12), so that the pins of a dead session are released in bounded time.
 */
#ifndef BL_PINS_H
#define BL_PINS_H

#include <stdint.h>

typedef struct bl_pins bl_pins;

/* Create a table for at most block_count_max different blocks at a time: 0 or -ENOMEM. */
int bl_pins_create(bl_pins **out, uint32_t block_count_max);
void bl_pins_destroy(bl_pins *pins);

/* Add a pin: return the block's pins in this session after it, or -ENOSPC: too many blocks, or more
 * pins of this one than 32 bits count. */
int64_t bl_pins_add(bl_pins *pins, uint32_t block);

/* Remove a pin: return the block's pins in this session after it, or -ENOENT. */
int64_t bl_pins_remove(bl_pins *pins, uint32_t block);

/* Take out any pinned block, with its count; -1 when there is none. */
int64_t bl_pins_pop(bl_pins *pins, uint32_t *count);

uint32_t bl_pins_count(const bl_pins *pins);

#endif
