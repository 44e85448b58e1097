/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Fuzzes a server with a hostile session and its host: request lines, bulk bytes and lobby lines
 * have any contents, with a right or a wrong check, and change while they are read.
 *
 * Invariants: the server does not crash; another, valid session keeps its grant and its pin; when
 * the hostile session has ended, the server has nothing of it.
 */
#include "fuzz.h"

enum { FUZZ_HOSTILE_HOST = 2, FUZZ_STEPS = 48, FUZZ_NAMES = 8, FUZZ_CHANGES = 4, FUZZ_TOKEN = 7 };
#define FUZZ_VALID_NONCE 0x5eed5eed5eed5eedull

static bl_pool *pool;
static bl_server *server;
static bl_index *meta;
static uint32_t valid, hostile;
static uint64_t hostile_nonce = 1;

static void lobby_write(uint32_t host, bl_lobby_request request)
{
    request.host = host;
    request.sequence_end = request.sequence;
    request.check = bl_message_check(&request, 0);
    bl_stream_line(&pool->memory, bl_lobby_request_offset(host), &request);
}

static uint32_t attach(uint32_t host, uint64_t nonce)
{
    bl_lobby_request request = {.sequence = server->lobby_seen[host] + 1,
                                .operation = BL_LOBBY_ATTACH, .nonce = nonce, .boot_id = {1, 1},
                                .epoch = server->epoch};
    lobby_write(host, request);
    bl_lobby_look(server, 1);
    int64_t lane = bl_lane_of(server, nonce);
    fuzz_must(lane >= 0, "a session gets a lane");
    return (uint32_t)lane;
}

/* Make a block call of the well-behaved session. Returns how many records the reply has. */
static uint32_t valid_call(bl_handler handler, const bl_block_request *head, const void *item,
                           size_t item_size)
{
    uint8_t request[128], reply[256];
    bl_call call = {.request = request, .reply = reply, .reply_capacity = sizeof reply,
                    .request_size = (uint32_t)(sizeof *head + item_size), .lane = valid};
    memcpy(request, head, sizeof *head);
    memcpy(request + sizeof *head, item, item_size);
    fuzz_must(handler(meta, &call) == 0, "the valid session's call is done");
    if (server->deferred)
        server->hooks.deferred(server->hooks.context); /* deferred work may read the reply, so it
                                                        * runs before the reply is freed */
    server->deferred = 0;
    bl_block_record record;
    memcpy(&record, reply + sizeof(bl_block_reply), sizeof record);
    return record.block;
}

static void valid_start(void)
{
    const uint64_t one[2] = {0x1111222233334444, 1}, two[2] = {0x5555666677778888, 2};
    bl_block_request reserve = {.count = 1, .length = 4096};
    bl_block_request lookup = {.count = 1, .flags = BL_LOOKUP_PIN};
    bl_block_request named = {.count = 1, .flags = BL_COMMIT_NAMED};
    uint32_t block = valid_call(bl_handle_reserve, &reserve, one, sizeof one);
    bl_named_commit commit = {.commit = {.key = {one[0], one[1]},
                                         .generation = meta->blocks[block].generation,
                                         .block = block},
                              .name = {.block_hash = 1, .block_tokens = 16, .rank_count = 1}};
    valid_call(bl_handle_commit, &named, &commit, sizeof commit);
    valid_call(bl_handle_lookup, &lookup, one, sizeof one);
    valid_call(bl_handle_reserve, &reserve, two, sizeof two);
}

int LLVMFuzzerInitialize(int *count, char ***arguments)
{
    (void)count, (void)arguments;
    pool = fuzz_pool();
    fuzz_must(bl_server_create(pool, fuzz_directory, 0, &server) == 0, "a server is made");
    fuzz_must(bl_index_create(server, BL_EVICT_LRU, &meta) == 0, "an index is made");
    fuzz_must(bl_lower_attach(meta, FUZZ_NAMES, 0, 0, FUZZ_TOKEN) == 0, "tiers are attached");
    fuzz_must(bl_journal_attach(meta, FUZZ_CHANGES) == 0, "a journal is attached");
    fuzz_must(bl_index_serve(meta) == 0, "the server serves");
    valid = attach(1, FUZZ_VALID_NONCE);
    valid_start();
    return 0;
}

static void request_write(uint32_t bulk_size)
{
    const bl_lane *lane = &server->lanes[hostile];
    uint64_t key = bl_message_key(lane->nonce, server->epoch);
    uint32_t sequence = lane->next + fuzz_byte() % 3;
    bl_request request = {.method = fuzz_byte() % (BL_METHOD_HINT + 1),
                          .size = (uint8_t)fuzz_number(), .epoch = (uint32_t)server->epoch};
    if (bulk_size > 0) {
        uint8_t bytes[BL_PAGE_SIZE];
        uint64_t offset = bl_bulk_in_offset(&pool->geometry, hostile);
        bl_fetch(&pool->memory, offset, bytes, bulk_size);
        bl_bulk bulk = {bulk_size, bl_crc32c(0, bytes, bulk_size)};
        request.flags = BL_MESSAGE_BULK;
        request.size = sizeof bulk;
        memcpy(request.payload, &bulk, sizeof bulk);
    } else {
        request.flags = fuzz_byte() % 4;
        fuzz_bytes(request.payload, sizeof request.payload);
    }
    bl_message_seal(&request, sequence, key + (fuzz_byte() > 240));
    bl_stream_line(&pool->memory,
                   bl_request_offset(&pool->geometry, hostile, bl_server_slot(server, sequence)),
                   &request);
}

/* Make a call of the lower tiers' service with consistent header and size. */
static uint32_t lower_fill(void)
{
    uint8_t bytes[BL_PAGE_SIZE] = {0};
    bl_lower_request head = {.token = FUZZ_TOKEN, .count = fuzz_number(), .kind = fuzz_byte() % 5};
    uint32_t items = head.count % 64;
    memcpy(bytes, &head, sizeof head);
    for (uint32_t i = 0; i < items && fuzz_left > 0; i++) {
        bl_lower_note note = {.key = {fuzz_byte() % 16, 0}, .block = fuzz_number(),
                              .stored = fuzz_byte(), .lost = fuzz_byte(), .ended = fuzz_byte() % 2};
        if (note.block < pool->geometry.block_count_max)
            note.generation = meta->blocks[note.block].generation;
        memcpy(bytes + sizeof head + i * sizeof note, &note, sizeof note);
    }
    bl_stream(&pool->memory, bl_bulk_in_offset(&pool->geometry, hostile), bytes, sizeof bytes);
    return (uint32_t)(sizeof head + items * sizeof(bl_lower_note));
}

/* Make a block call whose header and size are consistent if the input allows. */
static uint32_t bulk_fill(void)
{
    static const uint32_t item_sizes[] = {2 * sizeof(uint64_t), sizeof(bl_commit),
                                          sizeof(bl_named_commit)};
    uint8_t bytes[BL_PAGE_SIZE] = {0};
    bl_block_request head = {.fingerprint = fuzz_byte(), .length = fuzz_number(),
                             .chunk_size = fuzz_number(), .count = fuzz_number(),
                             .flags = fuzz_byte() % 4};
    uint32_t item_size = item_sizes[fuzz_byte() % 3], items = head.count % 46;
    memcpy(bytes, &head, sizeof head);
    for (uint32_t i = 0; i < items && fuzz_left > 0; i++) {
        bl_named_commit item = {.commit = {.key = {fuzz_byte() % 16, 0}, .block = fuzz_number()}};
        if (item.commit.block < pool->geometry.block_count_max)
            item.commit.generation = meta->blocks[item.commit.block].generation;
        if (item_size == sizeof item)
            item.name = (bl_name){.block_hash = fuzz_byte(), .parent_hash = fuzz_byte(),
                                  .block_tokens = fuzz_byte(), .rank = fuzz_byte(),
                                  .rank_count = fuzz_byte(), .flags = fuzz_number()};
        memcpy(bytes + sizeof head + i * item_size, &item, item_size);
    }
    bl_stream(&pool->memory, bl_bulk_in_offset(&pool->geometry, hostile), bytes, sizeof bytes);
    return (uint32_t)sizeof head + items * item_size;
}

/* Read the journal, as the publisher of events does. */
static void journal_read(void)
{
    bl_change changes[FUZZ_CHANGES];
    uint32_t first = 0;
    uint64_t lost;
    int64_t taken = bl_journal_take(meta, changes, 1 + fuzz_byte() % FUZZ_CHANGES, &lost);
    fuzz_must(taken >= 0 && taken <= FUZZ_CHANGES, "the journal gives no more than was requested");
    bl_change names[32];
    int64_t found = bl_names_read(pool, server->half, &first, 32, names);
    fuzz_must(found >= 1 && found <= 32, "the valid session's name is in the table");
}

static void step(void)
{
    bl_lobby_request made = {.sequence = fuzz_number(), .operation = fuzz_byte() % 4,
                             .nonce = fuzz_byte() % 2 ? hostile_nonce : fuzz_number(),
                             .old_nonce = fuzz_number(), .boot_id = {fuzz_byte(), 1},
                             .epoch = fuzz_byte() < 224 ? server->epoch : 0};
    switch (fuzz_byte() % 8) {
    case 0: fuzz_scribble(&pool->memory); break;
    case 1: lobby_write(FUZZ_HOSTILE_HOST, made); break;
    case 2:
    case 3: request_write(0); break;
    case 4: request_write(lower_fill()); break;
    case 5: journal_read(); break;
    default: request_write(bulk_fill()); break;
    }
    bl_server_round(server);
    bl_lobby_look(server, 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_next = data, fuzz_left = size;
    region_size = 0;
    hostile = attach(FUZZ_HOSTILE_HOST, ++hostile_nonce + (1ull << 32));
    region_start = bl_lane_offset(&pool->geometry, hostile);
    region_size = pool->geometry.lane_stride;
    for (uint32_t i = 0; i < FUZZ_STEPS && fuzz_left > 0; i++)
        step();
    region_size = 0;
    bl_hint_stat hints;
    bl_index_hints(meta, &hints);
    fuzz_must(hints.favored_bytes <= meta->shares[0].bytes / 4, "hints keep to their budget");
    fuzz_must(bl_pins_count(meta->pins[valid]) == 1, "the valid session's pin");
    fuzz_must(meta->holds[valid].grant_count == 1, "the valid session's grant");
    for (uint32_t lane = 0; lane < pool->geometry.lane_count; lane++)
        if (lane != valid && server->lanes[lane].state != BL_SESSION_FREE)
            bl_housekeeping_end(server, lane, BL_END_GONE);
    fuzz_must(server->live_count == 1, "the valid session is left");
    fuzz_must(meta->stat.grant_count == 1, "no other grant is left");
    bl_index_hints(meta, &hints);
    fuzz_must(hints.hint_count == 0 && hints.favored_bytes == 0, "no hint is left");
    fuzz_must(meta->stat.pinned_count == 1, "no other pin is left");
    return 0;
}
