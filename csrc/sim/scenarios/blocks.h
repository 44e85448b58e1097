/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Clients that write, read and remove blocks one by one, for use by several scenarios.
 */
#ifndef BL_SIM_BLOCKS_H
#define BL_SIM_BLOCKS_H

#include "sim/scenarios/paths.h"

enum {
    BL_BLOCKS_ROUNDS = 48,
    BL_BLOCKS_ROUNDS_MAX = 200,
    BL_BLOCKS_CHAIN = 4,        /* keys asked for together */
    BL_BLOCKS_KEY_COUNT_MAX = 24,
    BL_BLOCKS_LINES_MAX = 8,    /* lines of a payload */
    BL_BLOCKS_PAGE_COUNT = 8192,
    BL_BLOCKS_FINGERPRINT = 7,
    BL_BLOCKS_SERVER_VERBS = 8000,
    BL_BLOCKS_DAWDLE_NS = 5 * 1000 * 1000
};

typedef struct bl_blocks {
    bl_path path;
    uint32_t key_count;
    uint32_t loses;             /* 1: blocks may be evicted; 0: only a removal ends one */
    uint32_t wide;              /* 1: a block fills its extent, so extents come and go with it */
    uint64_t committed[BL_BLOCKS_KEY_COUNT_MAX]; /* generation whose commit was answered, or 0 */
    uint32_t removals[BL_BLOCKS_KEY_COUNT_MAX]; /* begun */
    uint32_t removing[BL_BLOCKS_KEY_COUNT_MAX]; /* removals not yet answered */
    uint64_t removed[BL_BLOCKS_KEY_COUNT_MAX]; /* generation whose removal was answered, or 0 */
    uint64_t removed_in[BL_BLOCKS_KEY_COUNT_MAX]; /* the epoch of the server that answered */
    uint8_t buried[BL_BLOCKS_KEY_COUNT_MAX]; /* 1: a removal was answered */
    uint8_t writer[BL_BLOCKS_PAGE_COUNT]; /* the writer of each page of data: process + 1, or 0 */
} bl_blocks;

/* A client at work. */
typedef struct bl_blocks_client {
    bl_blocks *blocks;
    const bl_pool *pool;
    bl_session *session;
    uint8_t self;               /* process + 1 */
} bl_blocks_client;

uint32_t bl_blocks_length(uint64_t key);
/* Fill a payload with bytes that no other key and no other generation has. */
void bl_blocks_fill(uint8_t *payload, uint64_t key, uint64_t generation);

/* Let some clients be slow: a server may be replaced, and space be given to others, before they go
 * on. */
void bl_blocks_dawdle(bl_blocks_client *client);

uint8_t *bl_blocks_writer(bl_blocks_client *client, const bl_block_record *record);
/* Check granted space: nobody else may write there, and nothing may be on its way to it. */
int bl_blocks_claim(bl_blocks_client *client, const bl_block_record *record);

int bl_blocks_put(bl_blocks_client *client, uint64_t key);
/* Copy a block that a lookup found: 1; 0: it was replaced meanwhile. */
int bl_blocks_copy(bl_blocks_client *client, uint64_t key, const bl_block_record *record,
                   void *payload);
/* Read a block that a lookup found: 1: right bytes; 0: a miss after all; or -EBADMSG. */
int bl_blocks_read(bl_blocks_client *client, uint64_t key, const bl_block_record *record);

int bl_blocks_get(bl_blocks_client *client, uint64_t first, uint32_t count, uint32_t flags);
/* Do one thing that a client does. */
int bl_blocks_round(bl_blocks_client *client);

int bl_blocks_work(bl_pool *pool, void *argument);

/* Run a server with the block index. */
int bl_blocks_serve(bl_pool *pool, void *argument);

#endif
