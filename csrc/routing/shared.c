/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The loads of workers as several processes of one gateway count them (api/routing.h). Every
 * process writes its own rows of a table in memory that they share, and adds the other rows to its
 * own counts. A word has one writer, and each word is a figure of its own: a reader that sees some
 * words before a request and some after it is off by one request. So no lock is needed.
 */
#include "api/routing.h"

#include <string.h>

#include "base/host_atomic.h"

enum { BL_LOAD_SHARE_WORDS = sizeof(bl_load_share) / sizeof(uint64_t) };

_Static_assert(sizeof(bl_load_share) == 128, "rows of different processes share no line");

/* A word is copied whole, whatever its type. */
static void bl_load_share_store(bl_load_share *row, const bl_load_share *value)
{
    uint64_t *to = (uint64_t *)(void *)row, words[BL_LOAD_SHARE_WORDS];
    memcpy(words, value, sizeof words);
    for (uint32_t i = 0; i < BL_LOAD_SHARE_WORDS; i++)
        bl_host_store(&to[i], words[i]);
}

static bl_load_share bl_load_share_read(const bl_load_share *row)
{
    const uint64_t *from = (const uint64_t *)(const void *)row;
    uint64_t words[BL_LOAD_SHARE_WORDS];
    for (uint32_t i = 0; i < BL_LOAD_SHARE_WORDS; i++)
        words[i] = bl_host_load(&from[i]);
    bl_load_share found;
    memcpy(&found, words, sizeof found);
    return found;
}

void bl_load_share_write(bl_load_share *row, const bl_load *load, const bl_prefills *prefills)
{
    bl_load_share value = {
        .active_requests = load->active_requests,
        .active_decode_blocks = load->active_decode_blocks,
        .outstanding_tokens = load->outstanding_tokens,
        .prefills = *prefills,
    };
    bl_load_share_store(row, &value);
}

void bl_load_share_add(const bl_load_table *table, uint32_t slot, double now, bl_load *load)
{
    for (uint32_t i = 0; i < table->process_count; i++) {
        if (i == table->process)
            continue;
        uint64_t at = (uint64_t)i * table->slot_count + slot;
        bl_load_share row = bl_load_share_read(&table->rows[at]);
        load->active_requests += row.active_requests;
        load->active_decode_blocks += row.active_decode_blocks;
        load->outstanding_tokens += row.outstanding_tokens;
        load->active_prefill_tokens += bl_prefills_tokens(&row.prefills, now);
        if (row.prefills.seconds > 0)   /* otherwise no duration was predicted */
            load->prefill_s += bl_prefills_seconds(&row.prefills, now);
    }
}

void bl_load_shares_add(const bl_load_table *table, const uint32_t *slots, uint32_t count,
                        double now, bl_candidate *rows)
{
    for (uint32_t i = 0; i < count; i++)
        bl_load_share_add(table, slots[i], now, &rows[i].load);
}
