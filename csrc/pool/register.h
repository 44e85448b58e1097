/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A line that is replaced in place and still always has a value: epoch and candidate lines.
 *
 * Such a line has two copies, which are written one after the other. A writer that dies in the
 * middle of one leaves the other whole: the old value while the first is written, the new one from
 * then on. So a torn line is never mistaken for an unwritten one. If neither copy becomes whole,
 * the memory is damaged, and that is an error of its own. There is one writer at a time.
 */
#ifndef BL_REGISTER_H
#define BL_REGISTER_H

#include <errno.h>

#include "coherence/coherence.h"
#include "coherence/crash_point.h"
#include "format/line.h"

enum {
    BL_REGISTER_SIZE = 2 * BL_LINE_SIZE,
    BL_REGISTER_TRIES = 64      /* reads of a line that seems to be written all the time */
};

/* Write a line, which ends in its check and is sealed with key. */
static inline void bl_register_write(const bl_memory *memory, uint64_t offset, const void *line)
{
    bl_publish_line(memory, offset, line); /* SYNC register */
    bl_crash_point("register.half_written");
    bl_crash_line("register.second_line", memory, offset + BL_LINE_SIZE, line);
    bl_publish_line(memory, offset + BL_LINE_SIZE, line);
}

/* Write the value that bl_register_read() returned once more, before a new writer's first value:
 * the former writer may have died in its second copy, and then only the first copy is whole. */
static inline void bl_register_mend(const bl_memory *memory, uint64_t offset, const void *line)
{
    bl_publish_line(memory, offset + BL_LINE_SIZE, line); /* SYNC register */
}

/* Read the value as this host's cache has it. Returns 1; 0 if no value was written yet (line is
 * zero); -EAGAIN if the first value ever is being written, or the second copy here is as old as
 * that (line is zero); or -BL_ERROR_EPOCH_DAMAGED if neither copy is whole, perhaps because it is
 * being written. */
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

/* Read the value as memory has it. Returns 1, 0 or damage, which is reported only after many reads.
 * If the second copy was unwritten at both of two reads, the first copy of the earlier read was no
 * second value: before a second value is written, the second copy holds the first value. */
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

/* Return 1 if both copies, as the last bl_register_read() refetched them, have this value. Only
 * then has its writer finished with it: a final value counts only after its last write. A stale
 * copy gives 0. */
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
