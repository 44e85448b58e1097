/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Cuts plans into spans, for devices that copy by their own addresses, and combines the checksums
 * that the device computed for spans.
 *
 * CRCs are linear over polynomials: the checksum of a chunk without its inversions is the sum of
 * its spans' checksums, each times x^(8n) for the n bytes that follow the span in the chunk.
 * Polynomials are reflected: x^0 is the highest bit.
 */
#include <errno.h>

#include "api/transfer.h"
#include "format/interleave.h"
#include "pool/pool.h"
#include "transfer/plan.h"

enum { BL_POWERS = 256 };

/* Powers that were computed, by the lowest bits of their exponents. All blocks of a plan are cut in
 * the same way, so the same few exponents recur. */
typedef struct bl_power_cache {
    uint32_t count[BL_POWERS];
    uint32_t power[BL_POWERS];
    uint8_t is_set[BL_POWERS];
} bl_power_cache;

static uint32_t bl_poly_multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; bit--) {
        product ^= b & (0u - ((a >> bit) & 1));
        b = (b >> 1) ^ (0x82f63b78u & (0u - (b & 1)));
    }
    return product;
}

/* Returns x^(8 * count) mod P. */
static uint32_t bl_poly_power(bl_power_cache *cache, uint32_t count)
{
    uint32_t place = (count ^ count >> 8) % BL_POWERS;
    if (cache->is_set[place] && cache->count[place] == count)
        return cache->power[place];
    uint32_t power = 0x80000000u, square = 1u << 23; /* x^8 */
    for (uint32_t left = count; left > 0; left >>= 1) {
        if (left & 1)
            power = bl_poly_multiply(power, square);
        square = bl_poly_multiply(square, square);
    }
    cache->is_set[place] = 1;
    cache->count[place] = count;
    cache->power[place] = power;
    return power;
}

/* Returns the index of the window of a piece, and the byte in it. */
static uint64_t bl_window_of(const bl_windows *windows, uint64_t offset, uint64_t *inside)
{
    bl_place place = bl_interleave_place(&windows->pool->memory.map, offset);
    *inside = place.device_offset & ((1ull << windows->window_shift) - 1);
    return (uint64_t)place.device * windows->window_count +
           (place.device_offset >> windows->window_shift);
}

int bl_spans_touch(const bl_windows *windows, const bl_plan *plan, uint8_t *touched)
{
    uint64_t inside;
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        const bl_piece *piece = &plan->pieces[i];
        if (piece->length > bl_stripe_rest(piece->offset))
            return -EINVAL;
        touched[bl_window_of(windows, piece->offset, &inside)] = 1;
    }
    for (uint32_t c = 0; plan->checksums && c < plan->chunk_count; c++) {
        uint64_t end = bl_chunk_end(&plan->chunks[c]);
        for (uint64_t at = plan->chunks[c].offset; at < end; at += bl_stripe_rest(at))
            touched[bl_window_of(windows, at, &inside)] = 1;
    }
    return 0;
}

void bl_spans_reach(const bl_windows *windows, const bl_plan *plan, const uint8_t *missing,
                    uint8_t *reached)
{
    uint64_t inside;
    for (uint32_t c = 0; c < plan->chunk_count; c++) {
        uint64_t end = bl_chunk_end(&plan->chunks[c]);
        reached[c] = 1;
        for (uint64_t at = plan->chunks[c].offset; at < end; at += bl_stripe_rest(at))
            if (missing[bl_window_of(windows, at, &inside)])
                reached[c] = 0;
    }
}

/* Returns where part number of count parts begins, in whole lines. */
static uint32_t bl_part_start(uint32_t length, uint32_t number, uint32_t count)
{
    uint32_t start = (uint32_t)((uint64_t)length * number / count);
    return number == count ? length : start & ~(uint32_t)(BL_LINE_SIZE - 1);
}

int64_t bl_spans_make(const bl_windows *windows, const bl_plan *plan, const uint64_t *bounced,
                      const int64_t *shared, int write, bl_span *spans)
{
    bl_power_cache powers = {0};
    int64_t made = 0;
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        const bl_piece *piece = &plan->pieces[i];
        const bl_chunk *chunk = bl_plan_chunk(plan, piece);
        uint32_t others = shared && shared[i] > 0 ? (uint32_t)shared[i] : 0;
        uint64_t inside = piece->offset - chunk->offset;
        uint64_t base = bounced ? bounced[piece->chunk - plan->chunk_base] : 0;
        if (!base)
            base = windows->bases[bl_window_of(windows, piece->offset, &inside)];
        if (!base)
            return -EFAULT;
        if (shared && shared[i] < 0)
            continue;
        uint32_t parts = (piece->length + BL_SPAN_SIZE - 1) / BL_SPAN_SIZE;
        for (uint32_t part = 0; part < parts; part++) {
            uint32_t start = bl_part_start(piece->length, part, parts);
            uint32_t end = bl_part_start(piece->length, part + 1, parts);
            uint32_t after = (uint32_t)(bl_chunk_end(chunk) - piece->offset) - end;
            spans[made++] = (bl_span){
                .pool = base + inside + start,
                .engine = piece->address ? piece->address + start : 0,
                .length = end - start,
                .power = plan->checksums ? bl_poly_power(&powers, after) : 0,
                .extra = !write ? others : after == 0 ? -chunk->length % BL_LINE_SIZE : 0,
                .chunk = piece->chunk,
            };
            for (uint32_t other = 1; other <= others; other++)
                spans[made++] =
                    (bl_span){.engine = piece[other].address + start, .chunk = piece->chunk};
        }
    }
    return made;
}

void bl_spans_tables(uint32_t lanes, uint32_t *words)
{
    bl_power_cache powers = {0};
    uint32_t factors[] = {bl_poly_power(&powers, lanes * BL_SPAN_WORD), bl_poly_power(&powers, 4)};
    for (uint32_t table = 0; table < 2; table++)
        for (uint32_t at = 0; at < 4 * 256; at++) /* byte at % 256 at place at / 256 of a word */
            *words++ = bl_poly_multiply(at % 256 << at / 256 * 8, factors[table]);
    for (uint32_t n = 0; n < 32; n++)
        *words++ = bl_poly_power(&powers, n * BL_SPAN_WORD + 4);
    for (uint32_t n = 0; n < 32; n++)
        *words++ = bl_poly_power(&powers, 1u << n);
}

int64_t bl_spans_sum(const bl_span *spans, const uint32_t *sums, uint64_t count,
                     const bl_plan *plan, int write)
{
    bl_power_cache powers = {0};
    int64_t bad = 0;
    uint64_t at = 0;
    uint32_t length = 0, blank = 0; /* a length of chunks, and the checksum of as many zeros */
    for (uint32_t c = 0; c < plan->chunk_count; c++) {
        if (plan->chunks[c].length != length) {
            length = plan->chunks[c].length;
            blank = ~bl_poly_multiply(bl_poly_power(&powers, length), ~0u);
        }
        uint32_t crc = blank;
        for (; at < count && spans[at].chunk - plan->chunk_base == c; at++)
            if (spans[at].length > 0)
                crc ^= sums[at];
        if (write)
            plan->checksums[c] = crc;
        else
            bad += plan->checksums[c] != crc;
    }
    return bad;
}
