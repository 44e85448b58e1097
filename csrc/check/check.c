/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Checks all lines of a pool: see check/line.h.
 */
#include <errno.h>
#include <stdlib.h>

#include "check/line.h"
#include "coherence/guard.h"

enum { BL_CHECK_ROUNDS = 32 };

/* Check everything once. Returns 0 or -ENOMEM. */
static int bl_check_round(bl_check *check)
{
    const bl_geometry *g = &check->pool->geometry;
    *check->report = (bl_check_report){0};
    check->moved = 0;
    check->suspicions = 0;
    bl_epoch_read(check->pool, &check->epoch);
    check->half = bl_check_half(&check->epoch);
    check->report->epoch = check->epoch.epoch;
    check->report->half = check->half;
    check->report->serving = bl_epoch_serving(&check->epoch);
    memset(check->sessions, 0, g->lane_count * sizeof *check->sessions);
    bl_check_server_lines(check);
    bl_check_sessions(check);
    bl_check_lobby(check);
    bl_check_lanes(check);
    int status = bl_extents_create(&check->extents, g->stripe_count);
    if (status == 0)
        status = bl_hash_create(&check->keys, g->block_count_max);
    if (status == 0)
        status = bl_places_create(&check->places, g);
    if (status == 0)
        status = bl_hash_create(&check->generations, g->block_count_max);
    if (status == 0) {
        bl_check_extents(check);
        status = bl_check_entries(check);
        bl_check_names(check);
    }
    bl_extents_destroy(check->extents);
    bl_hash_destroy(check->keys);
    bl_places_destroy(check->places);
    bl_hash_destroy(check->generations);
    check->extents = NULL;
    check->places = NULL;
    check->keys = check->generations = NULL;
    bl_check_same_server(check);
    return status;
}

static int bl_check_guarded(void *check) { return bl_check_round(check); }

int bl_check_pool(const bl_pool *pool, int payload, bl_finding *findings, uint32_t count_max,
                  bl_check_report *report, bl_io_queue *io_queue, uint32_t transfer_class)
{
    bl_check check = {.pool = pool,
                      .payload = payload,
                      .findings = findings,
                      .count_max = count_max,
                      .report = report,
                      .throttle = bl_throttle_make(io_queue, 0, transfer_class, UINT64_MAX, 1)};
    check.sessions = calloc(pool->geometry.lane_count, sizeof *check.sessions);
    if (check.sessions == NULL)
        return -ENOMEM;
    int status = 0, round = 0;
    do
        status = bl_guarded(&pool->memory, bl_check_guarded, &check);
    while (status == 0 && check.moved && ++round < BL_CHECK_ROUNDS);
    bl_throttle_end(&check.throttle);
    free(check.sessions);
    free(check.chunk);
    return status == 0 && check.moved ? -EAGAIN : status;
}
