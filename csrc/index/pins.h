/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The pins of one session, with a count for each block. Their number is bounded (D12), so the pins
 * of a dead session are released in bounded time.
 */
#ifndef BL_PINS_H
#define BL_PINS_H

#include <stdint.h>

typedef struct bl_pins bl_pins;

/* Create a table for at most block_count_max different blocks at a time. Returns 0 or -ENOMEM. */
int bl_pins_create(bl_pins **out, uint32_t block_count_max);
void bl_pins_destroy(bl_pins *pins);

/* Add a pin. Returns the block's new count of pins in this session, or -ENOSPC: too many blocks, or
 * the count exceeds 32 bits. */
int64_t bl_pins_add(bl_pins *pins, uint32_t block);

/* Remove a pin. Returns the block's new count of pins in this session, or -ENOENT. */
int64_t bl_pins_remove(bl_pins *pins, uint32_t block);

/* Remove any pinned block with all its pins. Returns the block, or -1 if there is none. */
int64_t bl_pins_pop(bl_pins *pins, uint32_t *count);

uint32_t bl_pins_count(const bl_pins *pins);

#endif
