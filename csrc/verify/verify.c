/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Runs an acceptance test: checks that the pool is idle, finds free stripes, schedules the tests,
 * and clears the stripes at the end.
 *
 * The pool has no server (the last one stopped cleanly, or there was none), so stripes outside of
 * extents cannot be granted. If a server starts, the test ends before the next batch; it uses the
 * last stripes of the devices, which a server allocates last.
 */
#include "verify/acceptance.h"

#include <errno.h>
#include <stdlib.h>

#include "coherence/guard.h"
#include "index/state.h"
#include "liveness/lock.h"

enum { BL_ACCEPTANCE_ROWS = 64 }; /* stripes of a device to examine, from its end */

/* ---- Choosing the stripes. */

/* Return 1 if this data stripe is in no extent. A torn mark counts as an extent. */
static int bl_acceptance_free(const bl_acceptance *acceptance, uint64_t stripe)
{
    const bl_geometry *g = &acceptance->pool.geometry;
    const bl_memory *memory = &acceptance->pool.memory;
    uint64_t first = stripe < BL_EXTENT_STRIPES_MAX ? 0 : stripe - BL_EXTENT_STRIPES_MAX + 1;
    for (uint64_t at = first; acceptance->epoch > 0 && at <= stripe; at++) {
        bl_extent_line line;
        uint64_t offset = bl_extent_line_offset(g, at, acceptance->epoch % BL_HALF_COUNT);
        bl_refetch(memory, offset, BL_LINE_SIZE);
        bl_load_line(memory, offset, &line);
        if (!bl_line_used((uint64_t *)&line))
            continue;
        if (!bl_table_whole(&line, at) ||
            (line.state != BL_EXTENT_FREE && stripe - at < line.stripe_count))
            return 0;
    }
    return 1;
}

/* Find the last free data stripe of a device, or the unused stripe of the metadata device. Returns
 * 0; -ENOENT: it has no data stripes; or -ENOSPC. */
static int bl_acceptance_find(const bl_acceptance *acceptance, uint32_t device, uint64_t *offset)
{
    const bl_geometry *g = &acceptance->pool.geometry;
    const bl_interleave *map = &acceptance->pool.memory.map;
    int status = -ENOENT;
    if (device < map->data_device) { /* bl_geometry_make leaves its last stripe unused */
        *offset = g->data_offset - BL_STRIPE_SIZE;
        return 0;
    }
    for (uint64_t row = map->device_stripes; row > 0; row--) {
        *offset = bl_interleave_offset(map, (bl_place){row << BL_STRIPE_SHIFT, device});
        if (*offset < g->data_offset || map->device_stripes - row == BL_ACCEPTANCE_ROWS)
            break;
        status = -ENOSPC;
        if (*offset < g->size &&
            bl_acceptance_free(acceptance, (*offset - g->data_offset) >> BL_STRIPE_SHIFT))
            return 0;
    }
    return status;
}

static int bl_acceptance_place(bl_acceptance *acceptance)
{
    for (uint32_t device = 0; device < acceptance->pool.geometry.device_count; device++) {
        uint32_t place = acceptance->device_count;
        int status = bl_acceptance_find(acceptance, device, &acceptance->scratch[place]);
        if (status == -ENOENT)
            continue;
        if (status < 0)
            return status;
        acceptance->device[place] = device;
        acceptance->device_count++;
    }
    return acceptance->device_count > 0 ? 0 : -ENOSPC;
}

/* Return 1 if the pool has no server. */
static int bl_acceptance_idle(const bl_acceptance *acceptance, uint64_t *epoch)
{
    bl_epoch_line line;
    bl_epoch_read(&acceptance->pool, &line);
    *epoch = line.epoch;
    return line.epoch == 0 || line.state == BL_SERVER_STOPPED;
}

/* ---- Choosing the cells. */

static int bl_acceptance_list(bl_acceptance *acceptance)
{
    uint32_t count = 0, kinds = BL_ACCEPTANCE_TEST_COUNT * BL_ACCEPTANCE_MODE_COUNT * 2;
    acceptance->cells = calloc((size_t)kinds * acceptance->device_count,
                               sizeof *acceptance->cells);
    if (acceptance->cells == NULL)
        return -ENOMEM;
    for (uint32_t test = 0; test < BL_ACCEPTANCE_TEST_COUNT; test++)
        for (uint32_t mode = 0; mode < BL_ACCEPTANCE_MODE_COUNT; mode++)
            for (uint32_t initiator = 0; initiator < 2; initiator++)
                for (uint32_t place = 0; place < acceptance->device_count; place++)
                    acceptance->cells[count++] = (bl_acceptance_cell){
                        .test = test, .mode = mode, .initiator = initiator, .place = place,
                        .device = acceptance->device[place]};
    acceptance->cell_count = count;
    return 0;
}

static int bl_acceptance_survey(void *context)
{
    bl_acceptance *acceptance = context;
    return bl_acceptance_idle(acceptance, &acceptance->epoch) ? bl_acceptance_place(acceptance)
                                                              : -EBUSY;
}

int bl_acceptance_create(const bl_pool *pool, const bl_acceptance_config *config,
                         bl_acceptance **out)
{
    bl_acceptance *acceptance = calloc(1, sizeof *acceptance);
    if (acceptance == NULL)
        return -ENOMEM;
    acceptance->pool = *pool;
    memset(acceptance->pool.memory.coherent, 0, sizeof acceptance->pool.memory.coherent);
    acceptance->config = *config;
    acceptance->raw_width = BL_LINE_SIZE;
    acceptance->nonce = acceptance->random = bl_new_nonce(&pool->memory);
    int status = bl_guarded(&acceptance->pool.memory, bl_acceptance_survey, acceptance);
    if (status == 0)
        status = bl_acceptance_list(acceptance);
    *out = acceptance;
    if (status < 0)
        bl_acceptance_destroy(acceptance);
    return status;
}

void bl_acceptance_destroy(bl_acceptance *acceptance)
{
    free(acceptance->cells);
    free(acceptance);
}

uint32_t bl_acceptance_cells(const bl_acceptance *acceptance, const bl_acceptance_cell **out)
{
    *out = acceptance->cells;
    return acceptance->cell_count;
}

/* ---- Running the cells of the test. */

/* Run some trials of a cell; index is the leader's. */
static int bl_acceptance_batch(bl_acceptance *acceptance, uint64_t index)
{
    uint64_t epoch;
    int status = index < acceptance->cell_count ? 0 : -EPIPE;
    if (status == 0 && (!bl_acceptance_idle(acceptance, &epoch) || epoch != acceptance->epoch))
        status = -EBUSY;
    for (uint32_t i = 0; status == 0 && i < BL_ACCEPTANCE_BATCH; i++)
        status = bl_acceptance_trial(acceptance, &acceptance->cells[index]);
    return status;
}

/* The leader's loop. It publishes 1 + the index of the next cell, or 0 at the end. */
static int bl_acceptance_lead(bl_acceptance *acceptance)
{
    const bl_memory *memory = &acceptance->pool.memory;
    const bl_acceptance_config *config = &acceptance->config;
    uint64_t end_ns = bl_now_ns(memory) + config->duration_ns;
    int status = 0;
    for (uint32_t sweep = 0; status == 0 && (sweep == 0 || bl_now_ns(memory) < end_ns); sweep++)
        for (uint32_t i = 0; status == 0 && i < acceptance->cell_count; i++) {
            const bl_acceptance_cell *cell = &acceptance->cells[i];
            if (!(config->tests >> cell->test & 1) || !(config->modes >> cell->mode & 1))
                continue;
            bl_acceptance_publish(acceptance, i + 1, 0);
            status = bl_acceptance_receive(acceptance);
            if (status == 0)
                status = bl_acceptance_batch(acceptance, i);
        }
    if (status == 0) {
        bl_acceptance_publish(acceptance, 0, 0);
        status = bl_acceptance_receive(acceptance);
    }
    return status;
}

static int bl_acceptance_follow(bl_acceptance *acceptance)
{
    for (;;) {
        bl_acceptance_publish(acceptance, 0, 0);
        int status = bl_acceptance_receive(acceptance);
        if (status < 0 || acceptance->received.word[0] == 0)
            return status;
        status = bl_acceptance_batch(acceptance, acceptance->received.word[0] - 1);
        if (status < 0)
            return status;
    }
}

static void bl_acceptance_clear_areas(const bl_acceptance *acceptance)
{
    const bl_memory *memory = &acceptance->pool.memory;
    static const uint8_t zeros[BL_LINE_SIZE];
    uint64_t end = (uint64_t)(1 + BL_ACCEPTANCE_AREA_COUNT) * BL_ACCEPTANCE_AREA;
    for (uint32_t i = 0; i < acceptance->device_count; i++)
        for (uint64_t at = BL_ACCEPTANCE_AREA; at < end; at += BL_LINE_SIZE)
            bl_stream_line(memory, acceptance->scratch[i] + at, zeros);
    bl_fence_full(memory);
}

/* Clear the stripes. Each side clears its own lines: b after a has published that everything else
 * is clear, a after b's lines are clear. If the other side does not respond now, the results are
 * still valid. */
static void bl_acceptance_part(bl_acceptance *acceptance)
{
    if (acceptance->config.role == 0) {
        bl_acceptance_clear_areas(acceptance);
        bl_acceptance_publish(acceptance, 0, 0);
        bl_acceptance_finish(acceptance);
    } else {
        acceptance->step++;
        bl_acceptance_receive(acceptance);
    }
    bl_acceptance_fall_silent(acceptance);
}

static int bl_acceptance_play(void *context)
{
    bl_acceptance *acceptance = context;
    int status = bl_acceptance_meet(acceptance);
    if (status == 0)
        status = acceptance->config.role == 0 ? bl_acceptance_lead(acceptance)
                                              : bl_acceptance_follow(acceptance);
    if (status == 0)
        bl_acceptance_part(acceptance);
    return status;
}

static int bl_acceptance_clear(void *context)
{
    bl_acceptance_clear_areas(context);
    bl_acceptance_fall_silent(context);
    return 0;
}

int bl_acceptance_run(bl_acceptance *acceptance)
{
    const bl_memory *memory = &acceptance->pool.memory;
    int status = bl_guarded(memory, bl_acceptance_play, acceptance);
    if (status < 0)
        bl_guarded(memory, bl_acceptance_clear, acceptance);
    return status;
}

void bl_acceptance_stop(bl_acceptance *acceptance)
{
    bl_shared_store(&acceptance->stopped, 1);
}
