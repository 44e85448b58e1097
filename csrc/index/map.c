/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The map of the pool's space, for display. Each device is divided into cells of some stripes; a
 * cell sums up the use of its stripes. It only reads, on the caller's thread.
 */
#include <string.h>

#include "base/minmax.h"
#include "format/interleave.h"
#include "index/state.h"

/* Add a data stripe, counted from the first one. */
static void bl_map_data(const bl_index *index, uint64_t stripe, bl_map_cell *cell)
{
    bl_extent_view view;
    uint32_t used, held;
    int retired = bl_extents_at(index->extents, stripe, &view) == 0 && view.retired;
    bl_pages_of_stripe(index->pages, stripe, &used, &held);
    cell->used_bytes += used;
    cell->held_bytes += held;
    cell->free_count += used + held == 0 && !retired;
    cell->retired_count += (uint32_t)retired;
    cell->kept_count += index->retained[stripe] != 0;
}

void bl_index_map(const bl_index *index, uint32_t cell_count, bl_map_cell *out)
{
    const bl_geometry *g = &index->pool->geometry;
    bl_interleave map = bl_interleave_of(g);
    uint64_t first_data = g->data_offset / BL_STRIPE_SIZE;
    memset(out, 0, (size_t)g->device_count * cell_count * sizeof *out);
    for (uint32_t device = 0; device < g->device_count; device++) {
        uint64_t rows = bl_device_stripes(&map, device), cells = bl_min(rows, cell_count);
        for (uint64_t place = 0; place < cells; place++) {
            bl_map_cell *cell = &out[(uint64_t)device * cell_count + place];
            for (uint64_t row = place * rows / cells; row < (place + 1) * rows / cells; row++) {
                bl_place at = {(row + 1) * BL_STRIPE_SIZE, device};
                uint64_t stripe = bl_interleave_offset(&map, at) / BL_STRIPE_SIZE;
                cell->stripe_count++;
                if (stripe < first_data)
                    cell->table_count++;
                else if (stripe - first_data < g->stripe_count)
                    bl_map_data(index, stripe - first_data, cell);
            }
        }
    }
}
