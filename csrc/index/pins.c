/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The pins of index/pins.h, in an open-addressing table: linear probing, at most half full, and a
 * removal that moves later entries back, so that there are no deleted markers.
 */
#include "index/pins.h"

#include <errno.h>
#include <stdlib.h>

typedef struct bl_pin_slot {
    uint32_t block;
    uint32_t count;             /* 0: the slot is empty */
} bl_pin_slot;

struct bl_pins {
    bl_pin_slot *pin;
    uint32_t mask;              /* slots - 1 */
    uint32_t shift;             /* 64 - log2(slots) */
    uint32_t count;
    uint32_t count_max;
    uint32_t cursor;            /* where bl_pins_pop looks next */
};

int bl_pins_create(bl_pins **out, uint32_t block_count_max)
{
    uint32_t shift = 63;
    while (1ull << (64 - shift) < 2ull * block_count_max)
        shift--;
    bl_pins *pins = calloc(1, sizeof *pins);
    bl_pin_slot *pin = calloc(1ull << (64 - shift), sizeof *pin);
    if (!pins || !pin || shift < 32) {
        free(pin);
        free(pins);
        return -ENOMEM;
    }
    pins->pin = pin;
    pins->shift = shift;
    pins->mask = (uint32_t)((1ull << (64 - shift)) - 1);
    pins->count_max = block_count_max;
    *out = pins;
    return 0;
}

void bl_pins_destroy(bl_pins *pins)
{
    if (!pins)
        return;
    free(pins->pin);
    free(pins);
}

static uint32_t bl_pins_home(const bl_pins *pins, uint32_t block)
{
    return (uint32_t)(block * 0x9e3779b97f4a7c15ull >> pins->shift);
}

/* Return the slot of block, or the empty slot where it would go. */
static uint32_t bl_pins_place(const bl_pins *pins, uint32_t block)
{
    uint32_t place = bl_pins_home(pins, block);
    while (pins->pin[place].count && pins->pin[place].block != block)
        place = (place + 1) & pins->mask;
    return place;
}

static void bl_pins_drop(bl_pins *pins, uint32_t hole)
{
    for (uint32_t place = (hole + 1) & pins->mask; pins->pin[place].count;
         place = (place + 1) & pins->mask) {
        uint32_t home = bl_pins_home(pins, pins->pin[place].block);
        if (((place - home) & pins->mask) < ((place - hole) & pins->mask))
            continue;           /* an entry must not move in front of its home slot */
        pins->pin[hole] = pins->pin[place];
        hole = place;
    }
    pins->pin[hole].count = 0;
    pins->count--;
}

int64_t bl_pins_add(bl_pins *pins, uint32_t block)
{
    bl_pin_slot *pin = &pins->pin[bl_pins_place(pins, block)];
    if (pin->count == UINT32_MAX || (!pin->count && pins->count == pins->count_max))
        return -ENOSPC;
    pins->count += !pin->count;
    pin->block = block;
    return ++pin->count;
}

int64_t bl_pins_remove(bl_pins *pins, uint32_t block)
{
    uint32_t place = bl_pins_place(pins, block);
    if (!pins->pin[place].count)
        return -ENOENT;
    int64_t left = --pins->pin[place].count;
    if (!left)
        bl_pins_drop(pins, place);
    return left;
}

int64_t bl_pins_pop(bl_pins *pins, uint32_t *count)
{
    if (!pins->count)
        return -1;
    while (!pins->pin[pins->cursor].count)
        pins->cursor = (pins->cursor + 1) & pins->mask;
    bl_pin_slot pin = pins->pin[pins->cursor];
    bl_pins_drop(pins, pins->cursor);
    *count = pin.count;
    return pin.block;
}

uint32_t bl_pins_count(const bl_pins *pins) { return pins->count; }
