/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Which server speaks for the pool: the valid epoch line with the greater number (D5).
 */
#ifndef BL_EPOCH_H
#define BL_EPOCH_H

#include "pool/boot.h"
#include "pool/message.h"
#include "pool/pool.h"
#include "pool/register.h"

/* Read the line of one half: 1; 0 if nothing was ever written there (out is zero); or
 * -BL_ERROR_EPOCH_DAMAGED. */
static inline int bl_epoch_line_read(const bl_pool *pool, uint32_t half, bl_epoch_line *out)
{
    int status = bl_register_read(&pool->memory, bl_epoch_offset(half), half, out);
    if (status == 1 && out->epoch % BL_HALF_COUNT != half)
        return -BL_ERROR_EPOCH_DAMAGED;
    return status;
}

/* Read the pool's epoch line; its epoch is 0 if nobody ever served the pool. 0, or
 * -BL_ERROR_EPOCH_DAMAGED: out is the other half's line, and perhaps not the pool's. */
static inline int bl_epoch_read(const bl_pool *pool, bl_epoch_line *out)
{
    int damaged = 0;
    memset(out, 0, sizeof *out);
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++) {
        bl_epoch_line line;
        int status = bl_epoch_line_read(pool, half, &line);
        if (status == 1 && line.epoch > out->epoch)
            *out = line;
        damaged |= status < 0;
    }
    return damaged ? -BL_ERROR_EPOCH_DAMAGED : 0;
}

/* May clients ask this server for a lane? */
static inline int bl_epoch_serving(const bl_epoch_line *line)
{
    return line->epoch != 0 && line->state == BL_SERVER_SERVING;
}

/* Did this server ever serve? If not, the half before its own still holds the truth. */
static inline int bl_epoch_served(const bl_epoch_line *line)
{
    return line->state == BL_SERVER_SERVING || line->state == BL_SERVER_STOPPED;
}

/* Has this server said that it writes no more? */
static inline int bl_epoch_last_word(const bl_epoch_line *line)
{
    return line->state == BL_SERVER_STOPPED || line->state == BL_SERVER_FAILED;
}

/* Annotations of the last bl_epoch_read(): see bl_confirm() and bl_ordered(). */
static inline void bl_epoch_confirm(const bl_pool *pool, uint64_t offset, uint64_t size)
{
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++)
        bl_confirm(&pool->memory, bl_epoch_offset(half), offset, size);
}

static inline void bl_epoch_ordered(const bl_pool *pool, uint64_t written)
{
    for (uint32_t half = 0; half < BL_HALF_COUNT; half++)
        bl_ordered(&pool->memory, bl_epoch_offset(half), written);
}

/* Must a host not use this pool, because a device has hardware coherence, which makes it one host's
 * own memory (D2), and the server of this line is another host's? */
static inline int bl_epoch_second_host(const bl_pool *pool, const bl_epoch_line *line,
                                       uint32_t host, const uint64_t boot_id[2])
{
    return pool->one_host && line->epoch != 0 &&
           (line->host != host || !bl_boot_same(line->boot_id, boot_id));
}

#endif
