/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The space of the entries that a check has read: blocks of any size at any page, without overlaps.
 */
#ifndef BL_PLACES_H
#define BL_PLACES_H

#include <stdint.h>

#include "format/pool_format.h"

typedef struct bl_places bl_places;

/* Create an empty set for this geometry. Returns 0 or -ENOMEM. */
int bl_places_create(bl_places **out, const bl_geometry *g);
void bl_places_destroy(bl_places *places);

/* Add a block's space. Returns 0; or -EEXIST, and *other is a block that overlaps it. */
int bl_places_add(bl_places *places, uint32_t number, uint64_t offset, uint32_t size,
                  uint32_t *other);

/* Remove a block's space. */
void bl_places_remove(bl_places *places, uint32_t number);

#endif
