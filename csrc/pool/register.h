/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A line that is overwritten in place and always has a readable value: epoch and candidate lines.
 *
 * Such a line has two copies, which are written one after the other. If the writer dies in the
 * middle of one, the other copy is whole: it has the old value while the first copy is written, and
 * the new value from then on. So a torn line is never mistaken for an unwritten one. If neither
 * copy becomes whole, the memory is damaged, which is an error of its own. There is one writer at a
 * time.
 */
#ifndef BL_REGISTER_H
#define BL_REGISTER_H

#include <errno.h>

#include "coherence/coherence.h"
#include "coherence/crash_point.h"
#include "format/line.h"

enum {
    BL_REGISTER_SIZE = 2 * BL_LINE_SIZE,
    BL_REGISTER_TRIES = 64      /* the most reads of a line that keeps changing */
};

/* Write a line that ends in its check. The caller has sealed it. */
static inline void bl_register_write(const bl_memory *memory, uint64_t offset, const void *line)
{
    bl_publish_line(memory, offset, line); /* SYNC register */
    bl_crash_point("register.half_written");
    bl_crash_line("register.second_line", memory, offset + BL_LINE_SIZE, line);
    bl_publish_line(memory, offset + BL_LINE_SIZE, line);
}

/* Rewrite the value that bl_register_read() returned, before a new writer's first value: the former
 * writer may have died while it wrote the second copy, and then only the first copy is whole. */
static inline void bl_register_mend(const bl_memory *memory, uint64_t offset, const void *line)
{
    bl_publish_line(memory, offset + BL_LINE_SIZE, line); /* SYNC register */
}

/* Read the value from this host's cache. Returns 1; 0 if no value was written yet (line is zero);
 * -EAGAIN if the very first value is being written, or the cached second copy is still unwritten
 * (line is zero); or -BL_ERROR_EPOCH_DAMAGED if neither copy is whole, perhaps because one is being
 * written. */
static inline int bl_register_load(const bl_memory *memory, uint64_t offset, uint64_t key,
                                   void *line)
{
    uint64_t first[8], second[8];
    bl_load_line(memory, offset, first); /* SYNC register */
    memcpy(line, first, sizeof first);
    if (bl_verify(memory, first[7] >> 32 == bl_table_check(first, key))) {
        bl_believe(memory, offset);
        return 1;
    }
    bl_load_line(memory, offset + BL_LINE_SIZE, second);
    memcpy(line, second, sizeof second);
    if (!bl_line_used(second))
        return bl_line_used(first) ? -EAGAIN : 0;
    if (!bl_verify(memory, second[7] >> 32 == bl_table_check(second, key)))
        return -BL_ERROR_EPOCH_DAMAGED;
    bl_believe(memory, offset + BL_LINE_SIZE);
    return 1;
}

/* Read the value from memory. Returns 1, 0, or, after many reads, -BL_ERROR_EPOCH_DAMAGED. If the
 * second copy is unwritten in two successive reads, the first copy of the earlier read was the
 * first value or none, because the second copy gets the first value before a second value is
 * written. */
static inline int bl_register_read(const bl_memory *memory, uint64_t offset, uint64_t key,
                                   void *line)
{
    int status = -BL_ERROR_EPOCH_DAMAGED, first_ever = 0;
    for (int tries = 0; status < 0 && first_ever < 2 && tries < BL_REGISTER_TRIES; tries++) {
        if (tries > 0)
            bl_pause(memory);
        bl_refetch(memory, offset, BL_REGISTER_SIZE);
        status = bl_register_load(memory, offset, key, line);
        first_ever += status == -EAGAIN;
    }
    return status == -EAGAIN ? 0 : status;
}

/* Return 1 if both copies had this value in the last bl_register_read(). Only then has the writer
 * completed it: a final value counts only after its last write. A stale cached copy gives 0. */
static inline int bl_register_settled(const bl_memory *memory, uint64_t offset, const void *line)
{
    uint64_t copies[2][8];
    bl_load_line(memory, offset, copies[0]);
    bl_load_line(memory, offset + BL_LINE_SIZE, copies[1]);
    if (!bl_verify(memory, memcmp(copies[0], line, sizeof copies[0]) == 0 &&
                               memcmp(copies[1], line, sizeof copies[1]) == 0))
        return 0;
    bl_believe(memory, offset);
    bl_believe(memory, offset + BL_LINE_SIZE);
    return 1;
}

#endif
