/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Reads and checks a line of a pool, and decides whether a suspicion becomes a finding: see
 * check/line.h.
 */
#include "check/line.h"

enum { BL_STRAY_LINES = 512 };

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

/* Return 1 if the pool's server is the same as at the start of the check. */
int bl_check_same_server(bl_check *check)
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
        bl_throttle_end(&check->throttle);
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

/* Check a line of an unused range. */
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
            return; /* one finding covers the range */
    }
}
