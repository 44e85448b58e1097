/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Fuzzes a client with a hostile server: reply lines, bulk bytes and entries have any contents,
 * with a right or a wrong check, and change while they are read.
 *
 * The input determines the length and the chunks of blocks, and the places of records, which are
 * as often near the end of the pool's data as near its start: what lies outside is not mapped.
 *
 * Invariants: the client does not crash, and what it returns to its caller lies in the pool's data.
 */
#include "fuzz.h"

enum { FUZZ_KEYS = 8, FUZZ_LENGTH_MAX = 64 << 10 };

static uint32_t fuzz_length, fuzz_chunk; /* of the blocks that the client requests */

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
                           .window = 1, .attached = 1, .liveness_lock = -1, .scratch = scratch,
                           .parent = &parent,
                           .heartbeat = {.memory = &pool->memory, .nonce = 77,
                                    .offset = bl_lane_offset(&pool->geometry, 1)}};
    strcpy(session.directory, fuzz_directory);
}

static void shape_choose(void)
{
    static const uint32_t chunks[] = {0, 64, 1024, 4096, 16384};
    uint32_t pages = 1 + fuzz_byte() % (FUZZ_LENGTH_MAX / BL_PAGE_SIZE);
    fuzz_length = pages * BL_PAGE_SIZE - fuzz_byte() % 2 * (fuzz_number() % BL_PAGE_SIZE);
    fuzz_chunk = chunks[fuzz_byte() % 5];
}

/* Choose a page of the pool's data, relative to its start or its end, or any page. */
static uint64_t offset_choose(void)
{
    const bl_geometry *g = &pool->geometry;
    uint8_t from = fuzz_byte();
    uint64_t page = from < 240 ? fuzz_byte() % 32 : fuzz_number();
    return from % 2 ? g->size - page * BL_PAGE_SIZE : g->data_offset + page * BL_PAGE_SIZE;
}

/* Fill the bulk area with a header and records that are plausible if the input allows. */
static uint32_t bulk_answer(void)
{
    const bl_geometry *g = &pool->geometry;
    uint8_t bytes[BL_PAGE_SIZE] = {0}, state = fuzz_byte() % 2 ? BL_BLOCK_HIT : BL_BLOCK_GRANTED;
    bl_block_reply head = {fuzz_number() % 10, fuzz_number()};
    memcpy(bytes, &head, sizeof head);
    for (uint32_t i = 0; i < head.count; i++) {
        uint8_t odd = fuzz_byte();
        bl_block_record record = {.offset = offset_choose(),
                                  .generation = fuzz_byte(), .block = fuzz_number(),
                                  .length = odd & 1 ? fuzz_number() : fuzz_length,
                                  .state = odd & 2 ? fuzz_byte() % 6 : state,
                                  .status = -(int32_t)(fuzz_number() % 2000)};
        memcpy(bytes + sizeof head + i * sizeof record, &record, sizeof record);
        if (record.block >= g->block_count_max)
            continue;
        bl_entry entry = {.key = {i, i}, .generation = record.generation, .offset = record.offset,
                          .length = odd & 4 ? record.length : fuzz_length,
                          .chunk_size = odd & 8 ? fuzz_number() : fuzz_chunk,
                          .state = BL_ENTRY_COMMITTED};
        bl_table_seal(&entry, record.block);
        bl_stream_line(&pool->memory, bl_entry_offset(g, record.block, session.half), &entry);
    }
    bl_stream(&pool->memory, bl_bulk_out_offset(g, session.lane, session.half), bytes,
              sizeof bytes);
    uint32_t size = (uint32_t)(sizeof head + head.count * sizeof(bl_block_record));
    return fuzz_byte() < 224 ? size : fuzz_number();
}

static void reply_write(uint32_t sequence)
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
    const bl_geometry *g = &pool->geometry;
    for (int64_t i = 0; i < count; i++) {
        const bl_block_record *record = &records[i];
        fuzz_must(record->state >= BL_BLOCK_HIT && record->state <= BL_BLOCK_REFUSED,
                  "a state that is passed on is one");
        if (record->state == BL_BLOCK_REFUSED ||
            (record->state == BL_BLOCK_PENDING && record->length == 0)) /* a pending record has no
                                                                         * block */
            continue;
        fuzz_must(record->block < g->block_count_max && record->offset >= g->data_offset &&
                      record->offset < g->size && record->length > 0 &&
                      record->length <= g->size - record->offset,
                  "a record that is passed on is one of this pool");
        fuzz_must(record->state != BL_BLOCK_GRANTED ||
                      (record->length == fuzz_length &&
                       bl_stored_size(fuzz_length, fuzz_chunk) <= g->size - record->offset),
                  "what may be written lies in the pool with its checksums");
    }
}

/* An engine that copies nothing, and checks its plans. */
static int engine_start(void *context, const bl_plan *plan, int write, void **copy)
{
    (void)write;
    fuzz_must(plan->piece_count > 0 && bl_plan_check(pool, plan) == 0,
              "what an engine copies lies in the pool");
    for (uint32_t i = 0; i < plan->piece_count; i++)
        fuzz_must(plan->pieces[i].offset >= pool->geometry.data_offset,
                  "what an engine copies is no metadata");
    *copy = context;
    return 0;
}

static int engine_wait(void *context, void *copy)
{
    fuzz_must(context == copy, "the copy is the one that was started");
    return fuzz_byte() % 4 ? 0 : -EBADMSG;
}

static void kv_call(const uint64_t *keys, int put, int engine)
{
    static uint8_t payload[FUZZ_KEYS][FUZZ_LENGTH_MAX];
    bl_fragment fragments[FUZZ_KEYS];
    uint8_t states[FUZZ_KEYS];
    int32_t statuses[FUZZ_KEYS];
    uint64_t mismatches = 0;
    for (uint32_t i = 0; i < FUZZ_KEYS; i++)
        fragments[i] = (bl_fragment){(uint64_t)(uintptr_t)payload[i], fuzz_length};
    bl_kv_batch batch = {.keys = keys, .fragments = fragments, .timeout_ns = 0,
                         .count = FUZZ_KEYS, .fragment_count = 1, .length = fuzz_length,
                         .chunk_size = fuzz_chunk, .check_checksums = fuzz_byte() % 4 > 0};
    static uint8_t any;
    bl_engine table = {&any, engine_start, engine_wait, {0}};
    batch.engine = engine ? &table : NULL;
    if (put)
        bl_kv_put(&session, &batch, states, statuses);
    else
        bl_kv_get(&session, &batch, states, &mismatches);
}

static void call(const uint64_t *keys)
{
    bl_block_record records[FUZZ_KEYS] = {0};
    bl_commit commits[FUZZ_KEYS] = {0};
    bl_block_request what = {.length = fuzz_length, .chunk_size = fuzz_chunk};
    int32_t statuses[FUZZ_KEYS];
    bl_index_stat stat;
    bl_task task;
    uint32_t state;
    switch (fuzz_byte() % 12) {
    case 0: records_check(records, bl_lookup(&session, keys, FUZZ_KEYS, 0, records, &state, 0));
        break;
    case 1:
        if (bl_reserve(&session, keys, FUZZ_KEYS, &what, records, 0) == 0)
            records_check(records, FUZZ_KEYS);
        break;
    case 2: bl_commit_blocks(&session, commits, FUZZ_KEYS, statuses, 0); break;
    case 3: bl_release_blocks(&session, records, FUZZ_KEYS, 0); break;
    case 4:
        bl_remove_blocks(&session, keys, FUZZ_KEYS, 0);
        bl_task_withdraw(&session, keys, 0);
        break;
    case 5: bl_index_get_stat(&session, &stat, 0); break;
    case 6:
        if (bl_task_claim(&session, 0, 1, &task, 0) == 0)
            fuzz_must(task.deliveries == 0 || task.length <= pool->geometry.size,
                      "a task is no longer than the pool");
        break;
    case 7: kv_call(keys, 1, 0); break;
    case 8: kv_call(keys, 1, 1); break;
    case 9: kv_call(keys, 0, 1); break;
    default: kv_call(keys, 0, 0); break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t keys[2 * FUZZ_KEYS];
    for (uint64_t i = 0; i < FUZZ_KEYS; i++)
        keys[2 * i] = keys[2 * i + 1] = i;
    fuzz_next = data, fuzz_left = size;
    region_size = 0;
    session_start();
    shape_choose();
    for (uint32_t sequence = 1; sequence <= 3; sequence++)
        reply_write(sequence);
    region_start = bl_lane_offset(&pool->geometry, session.lane);
    region_size = pool->geometry.lane_stride;
    call(keys);
    return 0;
}
