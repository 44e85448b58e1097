/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The walk over a pool, and when a suspicion becomes a finding: see check/check.h.
 */
#include <errno.h>
#include <stdlib.h>

#include "check/check.h"
#include "coherence/guard.h"

enum { BL_CHECK_ROUNDS = 32, BL_STRAY_LINES = 512 };

void bl_found(bl_check *check, uint32_t kind, uint64_t place, uint64_t detail)
{
    if (check->report->finding_count < check->count_max)
        check->findings[check->report->finding_count] = (bl_finding){kind, 0, place, detail};
    check->report->finding_count++;
}

void bl_check_refetch(const bl_check *check, uint64_t offset, uint64_t size)
{
    bl_refetch(&check->pool->memory, offset, size);
}

void bl_check_look(const bl_check *check, bl_check_line *line)
{
    bl_load_line(&check->pool->memory, line->offset, line->word);
}

/* Does the server that spoke when the look began still speak? */
static int bl_check_same_server(bl_check *check)
{
    bl_epoch_line now;
    bl_epoch_read(check->pool, &now);
    if (now.epoch != check->epoch.epoch ||
        bl_check_half(&now) != bl_check_half(&check->epoch))
        check->moved = 1;
    return !check->moved;
}

int bl_check_stands(bl_check *check, bl_check_line *lines, uint32_t count)
{
    if (check->suspicions++ < BL_CHECK_PATIENCE) {
        bl_toll_end(&check->toll);
        bl_nap(&check->pool->memory, BL_CHECK_NAP_NS);
    }
    int same = 1;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t before[8];
        memcpy(before, lines[i].word, sizeof before);
        bl_check_refetch(check, lines[i].offset, BL_LINE_SIZE);
        bl_check_look(check, &lines[i]);
        same &= memcmp(before, lines[i].word, sizeof before) == 0;
    }
    return same && bl_check_same_server(check);
}

uint32_t bl_check_judged(bl_check *check, bl_check_line *line, bl_check_judge judge)
{
    uint32_t same = 1;
    for (uint32_t tries = 0; tries < BL_CHECK_TRIES && !check->moved; tries++) {
        uint32_t kind = judge(check, line);
        if (kind == 0)
            return 0;
        if (same == BL_CHECK_LOOKS) {
            bl_found(check, kind, line->number, line->offset);
            return kind;
        }
        same = bl_check_stands(check, line, 1) ? same + 1 : 1;
    }
    return 0;
}

/* A line where nothing lies. */
static uint32_t bl_judge_stray(bl_check *check, const bl_check_line *line)
{
    (void)check;
    return bl_check_used(line) ? BL_FINDING_STRAY : 0;
}

void bl_check_stray(bl_check *check, uint64_t from, uint64_t to)
{
    for (uint64_t offset = from; offset < to && !check->moved; offset += BL_LINE_SIZE) {
        bl_check_line line = {.offset = offset, .number = offset / BL_LINE_SIZE};
        uint64_t piece = (uint64_t)BL_STRAY_LINES * BL_LINE_SIZE;
        if ((offset - from) % piece == 0)
            bl_check_refetch(check, offset, to - offset < piece ? to - offset : piece);
        bl_check_look(check, &line);
        if (bl_check_judged(check, &line, bl_judge_stray))
            return; /* one finding says it for the range */
    }
}

/* Everything, once: 0 or -ENOMEM. */
static int bl_check_round(bl_check *check)
{
    const bl_geometry *g = &check->pool->geometry;
    *check->report = (bl_check_report){0};
    check->moved = 0;
    check->suspicions = 0;
    bl_epoch_read(check->pool, &check->epoch);
    check->half = bl_check_half(&check->epoch);
    check->report->epoch = check->epoch.epoch;
    check->report->serving = bl_epoch_serving(&check->epoch);
    memset(check->sessions, 0, g->lane_count * sizeof *check->sessions);
    bl_check_server_lines(check);
    bl_check_sessions(check);
    bl_check_lobby(check);
    bl_check_lanes(check);
    int status = bl_extents_create(&check->extents, g->data_offset, g->stripe_count);
    if (status == 0)
        status = bl_index_create(&check->keys, g->block_count_max);
    if (status == 0)
        status = bl_index_create(&check->places, g->block_count_max);
    if (status == 0)
        status = bl_index_create(&check->generations, g->block_count_max);
    if (status == 0) {
        bl_check_extents(check);
        status = bl_check_entries(check);
    }
    bl_extents_destroy(check->extents);
    bl_index_destroy(check->keys);
    bl_index_destroy(check->places);
    bl_index_destroy(check->generations);
    check->extents = NULL;
    check->keys = check->places = check->generations = NULL;
    bl_check_same_server(check);
    return status;
}

static int bl_check_guarded(void *check) { return bl_check_round(check); }

int bl_check_pool(const bl_pool *pool, int payload, bl_finding *findings, uint32_t count_max,
                  bl_check_report *report, bl_port *port, uint32_t transfer_class)
{
    bl_check check = {.pool = pool,
                      .payload = payload,
                      .findings = findings,
                      .count_max = count_max,
                      .report = report,
                      .toll = bl_toll_make(port, 0, transfer_class, UINT64_MAX, 1)};
    check.sessions = calloc(pool->geometry.lane_count, sizeof *check.sessions);
    if (check.sessions == NULL)
        return -ENOMEM;
    int status = 0, round = 0;
    do
        status = bl_guarded(&pool->memory, bl_check_guarded, &check);
    while (status == 0 && check.moved && ++round < BL_CHECK_ROUNDS);
    bl_toll_end(&check.toll);
    free(check.sessions);
    free(check.chunk);
    return status == 0 && check.moved ? -EAGAIN : status;
}
