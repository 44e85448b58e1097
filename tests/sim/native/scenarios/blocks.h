/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Clients that write, read and remove blocks one by one, shared by several scenarios.
 */
#ifndef BL_SIM_BLOCKS_H
#define BL_SIM_BLOCKS_H

#include "sim/native/scenarios/paths.h"

enum {
    BL_BLOCKS_ROUNDS = 48,
    BL_BLOCKS_ROUNDS_MAX = 200,
    BL_BLOCKS_CHAIN = 4,        /* keys of one lookup */
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
    uint32_t loses;             /* 1: blocks may be evicted; 0: only removals end them */
    uint32_t wide;              /* 1: a block fills its extent, which opens and closes with it */
    uint64_t committed[BL_BLOCKS_KEY_COUNT_MAX]; /* generation of the last answered commit, or 0 */
    uint32_t removals[BL_BLOCKS_KEY_COUNT_MAX]; /* begun */
    uint32_t removing[BL_BLOCKS_KEY_COUNT_MAX]; /* removals not yet answered */
    uint64_t removed[BL_BLOCKS_KEY_COUNT_MAX]; /* generation of the last answered removal, or 0 */
    uint64_t removed_in[BL_BLOCKS_KEY_COUNT_MAX]; /* epoch of the server that answered it */
    uint8_t buried[BL_BLOCKS_KEY_COUNT_MAX]; /* 1: a removal was answered */
    uint8_t writer[BL_BLOCKS_PAGE_COUNT]; /* the writer of each page of data: process + 1, or 0 */
} bl_blocks;

/* The state of a client. */
typedef struct bl_blocks_client {
    bl_blocks *blocks;
    const bl_pool *pool;
    bl_session *session;
    uint8_t self;               /* process + 1 */
} bl_blocks_client;

uint32_t bl_blocks_length(uint64_t key);
/* Fill a payload with bytes unique to the key and generation. */
void bl_blocks_fill(uint8_t *payload, uint64_t key, uint64_t generation);

/* Delay some clients, so that a server may be replaced, and space granted to others, before they
 * continue. */
void bl_blocks_dawdle(bl_blocks_client *client);

uint8_t *bl_blocks_writer(bl_blocks_client *client, const bl_block_record *record);
/* Check granted space: no other writer, and no pending store, may affect it. */
int bl_blocks_claim(bl_blocks_client *client, const bl_block_record *record);

int bl_blocks_put(bl_blocks_client *client, uint64_t key);
/* Copy a block from a lookup. Returns 0 if it was replaced meanwhile. */
int bl_blocks_copy(bl_blocks_client *client, uint64_t key, const bl_block_record *record,
                   void *payload);
/* Read a block from a lookup. Returns 1: right bytes; 0: a miss after all; or -EBADMSG. */
int bl_blocks_read(bl_blocks_client *client, uint64_t key, const bl_block_record *record);

int bl_blocks_get(bl_blocks_client *client, uint64_t first, uint32_t count, uint32_t flags);
/* Do one random operation of a client. */
int bl_blocks_round(bl_blocks_client *client);

int bl_blocks_work(bl_pool *pool, void *argument);

/* Run a server with the block index. */
int bl_blocks_serve(bl_pool *pool, void *argument);

#endif
