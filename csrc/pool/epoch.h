/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The epoch line of the pool's server: the valid line with the greater epoch (D5).
 */
#ifndef BL_EPOCH_H
#define BL_EPOCH_H

#include "pool/boot.h"
#include "pool/message.h"
#include "pool/pool.h"
#include "pool/register.h"

/* Read the line of one half. Returns 1; 0 if it was never written (out is zero); or
 * -BL_ERROR_EPOCH_DAMAGED. */
static inline int bl_epoch_line_read(const bl_pool *pool, uint32_t half, bl_epoch_line *out)
{
    int status = bl_register_read(&pool->memory, bl_epoch_offset(half), half, out);
    if (status == 1 && out->epoch % BL_HALF_COUNT != half)
        return -BL_ERROR_EPOCH_DAMAGED;
    return status;
}

/* Read the pool's epoch line; its epoch is 0 if the pool never had a server. Returns 0, or
 * -BL_ERROR_EPOCH_DAMAGED; then out is the other half's line, which may not be the pool's. */
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

/* Return 1 if clients may request a lane from this server. */
static inline int bl_epoch_serving(const bl_epoch_line *line)
{
    return line->epoch != 0 && line->state == BL_SERVER_SERVING;
}

/* Return 1 if this server has ever served. If not, its predecessor's half is still valid. */
static inline int bl_epoch_served(const bl_epoch_line *line)
{
    return line->state == BL_SERVER_SERVING || line->state == BL_SERVER_STOPPED;
}

/* Return 1 if this server has declared that it will not write any more. */
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

/* Return 1 if this host must not use the pool: a device with data has hardware coherence, which
 * makes it one host's own memory (D2), and the server of this line runs on another host. */
static inline int bl_epoch_second_host(const bl_pool *pool, const bl_epoch_line *line,
                                       uint32_t host, const uint64_t boot_id[2])
{
    return pool->one_host && line->epoch != 0 &&
           (line->host != host || !bl_boot_same(line->boot_id, boot_id));
}

#endif
