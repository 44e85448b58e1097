/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What a mad server can do to a client: reply lines and bulk bytes that say anything, sealed right
 * or not, and that change while they are read; entries likewise.
 *
 * Always true: the client lives, and what it passes on to its caller lies in the pool's data.
 */
#include "fuzz.h"

enum { FUZZ_KEYS = 8, FUZZ_LENGTH = 4096 };

static bl_pool *pool;
static bl_session session;
static uint32_t parent = 1;

int LLVMFuzzerInitialize(int *count, char ***arguments)
{
    (void)count, (void)arguments;
    pool = fuzz_pool();
    session.scratch = malloc(2 * (size_t)pool->geometry.bulk_size);
    return 0;
}

static void session_start(void)
{
    uint8_t *scratch = session.scratch;
    session = (bl_session){.pool = pool, .nonce = 77, .epoch = 3, .half = 1, .lane = 1,
                           .window = 1, .attached = 1, .proof = -1, .scratch = scratch,
                           .parent = &parent};
    strcpy(session.directory, fuzz_directory);
}

/* What stands in the bulk area: a head and records, plausible as far as the input lets them be. */
static uint32_t bulk_answer(void)
{
    const bl_geometry *g = &pool->geometry;
    uint8_t bytes[BL_PAGE_SIZE] = {0};
    bl_block_reply head = {fuzz_number() % 10, fuzz_number()};
    memcpy(bytes, &head, sizeof head);
    for (uint32_t i = 0; i < head.count; i++) {
        bl_block_record record = {.offset = g->data_offset + fuzz_number() * (uint64_t)BL_PAGE_SIZE,
                                  .generation = fuzz_byte(), .block = fuzz_number(),
                                  .length = fuzz_byte() % 2 ? FUZZ_LENGTH : fuzz_number(),
                                  .state = fuzz_byte() % 6,
                                  .status = -(int32_t)(fuzz_number() % 2000)};
        memcpy(bytes + sizeof head + i * sizeof record, &record, sizeof record);
        if (record.block >= g->block_count_max)
            continue;
        bl_entry entry = {.key = {i, i}, .generation = record.generation, .offset = record.offset,
                          .length = record.length, .chunk_size = fuzz_number(),
                          .state = BL_ENTRY_COMMITTED};
        bl_table_seal(&entry, record.block);
        bl_stream_line(&pool->memory, bl_entry_offset(g, record.block, session.half), &entry);
    }
    bl_stream(&pool->memory, bl_bulk_out_offset(g, session.lane, session.half), bytes,
              sizeof bytes);
    uint32_t size = (uint32_t)(sizeof head + head.count * sizeof(bl_block_record));
    return fuzz_byte() < 224 ? size : fuzz_number();
}

static void reply_say(uint32_t sequence)
{
    const bl_geometry *g = &pool->geometry;
    bl_reply reply = {.epoch = fuzz_byte() < 224 ? 3 : fuzz_number(), .flags = fuzz_byte() % 4,
                      .size = (uint8_t)fuzz_number(),
                      .status = fuzz_byte() < 200 ? 0 : (int32_t)fuzz_number()};
    fuzz_bytes(reply.payload, sizeof reply.payload);
    if (fuzz_byte() < 160) {
        bl_bulk bulk = {bulk_answer(), 0};
        uint8_t bytes[BL_PAGE_SIZE];
        bl_fetch(&pool->memory, bl_bulk_out_offset(g, session.lane, session.half), bytes,
                 sizeof bytes);
        if (bulk.size <= sizeof bytes)
            bulk.check = bl_crc32c(0, bytes, bulk.size);
        reply.flags = BL_MESSAGE_BULK;
        reply.size = sizeof bulk;
        memcpy(reply.payload, &bulk, sizeof bulk);
    }
    bl_message_seal(&reply, sequence, bl_message_key(session.nonce, session.epoch));
    bl_stream_line(&pool->memory,
                   bl_reply_offset(g, session.lane, session.half, bl_slot_of(&session, sequence)),
                   &reply);
}

static void records_check(const bl_block_record *records, int64_t count)
{
    fuzz_must(count <= FUZZ_KEYS, "no more is answered than was asked");
    for (int64_t i = 0; i < count; i++)
        fuzz_must(records[i].state == BL_BLOCK_REFUSED ||
                      bl_record_sane(&pool->geometry, &records[i]),
                  "a record that is passed on is one of this pool");
}

static void kv_call(const uint64_t *keys, int put)
{
    static uint8_t payload[FUZZ_KEYS][FUZZ_LENGTH];
    bl_fragment fragments[FUZZ_KEYS];
    uint8_t states[FUZZ_KEYS];
    int32_t statuses[FUZZ_KEYS];
    uint64_t mismatches = 0;
    for (uint32_t i = 0; i < FUZZ_KEYS; i++)
        fragments[i] = (bl_fragment){(uint64_t)(uintptr_t)payload[i], FUZZ_LENGTH};
    bl_kv_batch batch = {.keys = keys, .fragments = fragments, .timeout_ns = 0,
                         .count = FUZZ_KEYS, .fragment_count = 1, .length = FUZZ_LENGTH,
                         .chunk_size = 1024, .verify = 1};
    if (put)
        bl_kv_put(&session, &batch, states, statuses);
    else
        bl_kv_get(&session, &batch, states, &mismatches);
}

static void call(const uint64_t *keys)
{
    bl_block_record records[FUZZ_KEYS];
    bl_commit commits[FUZZ_KEYS] = {0};
    bl_block_request what = {.length = FUZZ_LENGTH};
    int32_t statuses[FUZZ_KEYS];
    bl_meta_stat stat;
    uint32_t state;
    switch (fuzz_byte() % 8) {
    case 0: records_check(records, bl_lookup(&session, keys, FUZZ_KEYS, 0, records, &state, 0));
        break;
    case 1:
        if (bl_reserve(&session, keys, FUZZ_KEYS, &what, records, 0) == 0)
            records_check(records, FUZZ_KEYS);
        break;
    case 2: bl_commit_blocks(&session, commits, FUZZ_KEYS, statuses, 0); break;
    case 3: bl_release_blocks(&session, commits, FUZZ_KEYS, 0); break;
    case 4: bl_remove_blocks(&session, keys, FUZZ_KEYS, 0); break;
    case 5: bl_meta_ask_stat(&session, &stat, 0); break;
    case 6: kv_call(keys, 1); break;
    default: kv_call(keys, 0); break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t keys[2 * FUZZ_KEYS];
    for (uint64_t i = 0; i < FUZZ_KEYS; i++)
        keys[2 * i] = keys[2 * i + 1] = i;
    fuzz_next = data, fuzz_left = size;
    prey_size = 0;
    session_start();
    for (uint32_t sequence = 1; sequence <= 3; sequence++)
        reply_say(sequence);
    prey_start = bl_lane_offset(&pool->geometry, session.lane);
    prey_size = pool->geometry.lane_stride;
    call(keys);
    return 0;
}
