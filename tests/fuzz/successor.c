/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Fuzzes a takeover with a hostile predecessor: any line of its half, with a right or a wrong
 * check, and lines that change while they are read.
 *
 * Invariants: the takeover succeeds or fails with an error; all blocks that it recovers lie in the
 * pool's data, without overlaps.
 */
#include "fuzz.h"

enum { FUZZ_CHANGES = 12 };

static bl_pool *pool;
static uint8_t *healthy;        /* the regions before the data, as a server left them */

static bl_index *serve(bl_server **server, int *status)
{
    bl_index *meta = NULL;
    fuzz_must(bl_server_create(pool, fuzz_directory, 0, server) == 0, "a server is made");
    fuzz_must(bl_index_create(*server, BL_EVICT_LRU, &meta) == 0, "an index is made");
    *status = bl_index_serve(meta);
    return meta;
}

static void end(bl_server *server, bl_index *meta)
{
    bl_server_destroy(server);
    bl_index_destroy(meta);
}

static void copy_front(uint8_t *to, const uint8_t *from)
{
    for (uint64_t offset = 0; offset < pool->geometry.data_offset; offset += BL_LINE_SIZE) {
        if (to)
            memcpy(to + offset, bl_address(&pool->memory, offset), BL_LINE_SIZE);
        else
            memcpy(bl_address(&pool->memory, offset), from + offset, BL_LINE_SIZE);
    }
}

int LLVMFuzzerInitialize(int *count, char ***arguments)
{
    (void)count, (void)arguments;
    bl_server *server;
    int status;
    pool = fuzz_pool();
    bl_index *meta = serve(&server, &status);
    fuzz_must(status == 0, "a new pool is served");
    for (uint64_t i = 0; i < 8; i++) {
        bl_block_request head = {.count = 1, .length = 4096u << (i % 3)};
        uint8_t request[sizeof head + 16], reply[64];
        uint64_t key[2] = {i + 1, i};
        memcpy(request, &head, sizeof head);
        memcpy(request + sizeof head, key, sizeof key);
        bl_call call = {.request = request, .request_size = sizeof request, .reply = reply,
                        .reply_capacity = sizeof reply};
        bl_handle_reserve(meta, &call);
        bl_block_record record;
        memcpy(&record, reply + sizeof(bl_block_reply), sizeof record);
        bl_commit commit = {.key = {key[0], key[1]}, .generation = record.generation,
                            .block = record.block};
        const bl_name name = {.block_hash = i + 1, .parent_hash = i, .block_tokens = 16 * (i % 2),
                              .rank_count = 1};
        fuzz_must(bl_commit_one(meta, 0, &commit, &name) == 0, "a block is committed");
    }
    end(server, meta);
    healthy = malloc(pool->geometry.data_offset);
    copy_front(healthy, NULL);
    return 0;
}

/* Change a line of the predecessor's half, and mostly correct its checksum. */
static void change(void)
{
    const bl_geometry *g = &pool->geometry;
    uint32_t kind = fuzz_byte() % 5, index = fuzz_byte(), half = 1;
    uint32_t counts[] = {g->lane_count, g->block_count_max, (uint32_t)g->stripe_count, 1,
                         g->block_count_max};
    index %= counts[kind];
    uint64_t offsets[] = {bl_session_offset(g, index, half), bl_entry_offset(g, index, half),
                          bl_extent_line_offset(g, index, half), bl_epoch_offset(half),
                          bl_name_offset(g, index, half)};
    uint8_t *line = bl_address(&pool->memory, offsets[kind]);
    for (uint32_t n = 1 + fuzz_byte() % 4; n > 0; n--) {
        uint32_t word = fuzz_number();
        memcpy(line + fuzz_byte() % 15 * 4, &word, sizeof word);
    }
    if (fuzz_byte() < 224) {
        uint32_t check = bl_table_check(line, kind == 3 ? half : index);
        memcpy(line + BL_LINE_SIZE - sizeof check, &check, sizeof check);
    }
}

static void served_check(const bl_index *meta)
{
    const bl_geometry *g = &pool->geometry;
    uint64_t end_of_data = g->data_offset + g->stripe_count * BL_STRIPE_SIZE;
    for (uint32_t i = 0; i < g->block_count_max; i++) {
        const bl_block *block = &meta->blocks[i];
        if (block->state != BL_NUMBER_COMMITTED)
            continue;
        uint64_t stored = bl_stored_size(block->length, block->chunk_size);
        fuzz_must(block->offset >= g->data_offset && block->offset + stored <= end_of_data,
                  "a block that is served lies in the data");
        for (uint32_t k = 0; k < i; k++)
            fuzz_must(meta->blocks[k].state != BL_NUMBER_COMMITTED ||
                          meta->blocks[k].offset != block->offset,
                      "no two blocks lie in one place");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bl_server *server;
    int status;
    fuzz_next = data, fuzz_left = size;
    region_size = 0;
    copy_front(NULL, healthy);
    for (uint32_t i = 1 + fuzz_byte() % FUZZ_CHANGES; i > 0; i--)
        change();
    region_start = bl_entry_offset(&pool->geometry, 0, 1);
    region_size = (uint64_t)pool->geometry.block_count_max * BL_LINE_SIZE;
    bl_index *meta = serve(&server, &status);
    region_size = 0;
    if (status == 0)
        served_check(meta);
    end(server, meta);
    return 0;
}
