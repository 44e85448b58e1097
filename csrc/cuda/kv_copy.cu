/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The gather (engine memory to pool) and scatter (pool to engine memory) kernels, with fused
 * CRC-32C. They take raw pointers and a stream. A whole batch is one launch of a few persistent
 * blocks: each group of lanes takes every n-th tile, prefetches the next tile's description, and
 * keeps BL_UNROLL words per lane in flight. If source, target or length are not aligned to 16
 * bytes, words have 8, 4 or 1 bytes. In a scatter, a piece without an address only contributes to
 * the checksum; where rows overlap, a word is loaded once and stored to all its targets, so the
 * checksum is that of the delivered bytes even if the pool changes meanwhile.
 *
 * This file is compiled by NVRTC; by a C++ compiler, to run on a CPU (host.cuh, run.cuh); and by a
 * C++ compiler with sanitizers, for tests (harness.cu).
 */
#ifdef __CUDACC__
#include "ptx.cuh"
#else
#include "host.cuh"
#endif

#include "crc32c.cuh"

typedef struct bl_span {
    uint64_t source;
    uint64_t target;            /* 0: only for the checksum */
    uint32_t length;
    uint32_t lane;
} bl_span;

template <int LANES> BL_DEVICE uint32_t bl_unit(uint32_t first, int step, uint32_t lane)
{
    if (BL_PLANT == BL_PLANT_STRIDED)
        return first + lane * BL_UNROLL + (uint32_t)step;
    return first + (uint32_t)step * LANES + lane;
}

/* Copy the bytes after the last whole word, one per lane. */
template <int LANES, bool TO_POOL, bool SUM>
BL_DEVICE uint32_t bl_move_tail(bl_span span, uint32_t start, const uint32_t *tables)
{
    uint32_t place = start + span.lane;
    if (place >= span.length || BL_PLANT == BL_PLANT_TAIL)
        return 0;
    bl_word<1> byte = bl_load(span.source + place, bl_word<1>());
    if (span.target)
        bl_store<TO_POOL>(span.target + place, byte);
    if (!SUM)
        return 0;
    uint32_t after = span.length - 1 - place;
    return bl_crc_multiply(bl_crc_word<1>(tables, byte), bl_crc_power(tables, after));
}

/* Return the CRC of a lane's words, shifted over what follows them in the tile. */
template <int LANES, int WIDTH>
BL_DEVICE uint32_t bl_move_sum(bl_span span, uint32_t crc, const uint32_t *tables)
{
    uint32_t count = span.length / WIDTH, ragged = span.length - count * WIDTH;
    if (count <= span.lane)
        return 0;
    uint32_t words_after = (count - 1 - span.lane) % LANES;
    uint32_t power = WIDTH == 16 ? tables[BL_CRC_WORDS + words_after]
                                 : bl_crc_power(tables, words_after * WIDTH);
    if (ragged > 0)
        power = bl_crc_multiply(power, bl_crc_power(tables, ragged));
    return bl_crc_multiply(crc, power);
}

/* Copy a tile in words of WIDTH bytes. Returns this lane's part of the tile's checksum. */
template <int LANES, int WIDTH, bool TO_POOL, bool SUM>
BL_DEVICE uint32_t bl_move(bl_span span, const uint32_t *tables)
{
    uint32_t count = span.length / WIDTH, crc = 0, next = span.lane, first = 0;
    uint32_t stride = SUM ? bl_crc_stride<LANES, WIDTH>(tables) : 0;
    bl_word<WIDTH> words[BL_UNROLL];
#pragma unroll 1
    for (; first + LANES * BL_UNROLL <= count; first += LANES * BL_UNROLL) {
#pragma unroll
        for (int i = 0; i < BL_UNROLL; i++)
            words[i] = bl_load(span.source + bl_unit<LANES>(first, i, span.lane) * WIDTH, words[i]);
        if (span.target) {
#pragma unroll
            for (int i = 0; i < BL_UNROLL; i++)
                bl_store<TO_POOL>(span.target + bl_unit<LANES>(first, i, span.lane) * WIDTH,
                                  words[i]);
        }
        if (SUM) {
#pragma unroll
            for (int i = 0; i < BL_UNROLL; i++)
                crc = bl_crc_advance<WIDTH>(tables, crc, stride) ^
                      bl_crc_word<WIDTH>(tables, words[i]);
        }
        next += LANES * BL_UNROLL;
    }
#pragma unroll
    for (int i = 0; i < BL_UNROLL; i++)
        if (next + i * LANES < count)
            words[i] = bl_load(span.source + (next + i * LANES) * WIDTH, words[i]);
    if (span.target) {
#pragma unroll
        for (int i = 0; i < BL_UNROLL; i++)
            if (next + i * LANES < count)
                bl_store<TO_POOL>(span.target + (next + i * LANES) * WIDTH, words[i]);
    }
    if (BL_PLANT == BL_PLANT_TWICE && span.target && count > 0 && span.lane == 0)
        bl_store<TO_POOL>(span.target, bl_load(span.source, words[0]));
    uint32_t tail = bl_move_tail<LANES, TO_POOL, SUM>(span, count * WIDTH, tables);
    if (!SUM)
        return 0;
#pragma unroll
    for (int i = 0; i < BL_UNROLL; i++)
        if (next + i * LANES < count)
            crc = bl_crc_advance<WIDTH>(tables, crc, stride) ^
                  bl_crc_word<WIDTH>(tables, words[i]);
    return bl_move_sum<LANES, WIDTH>(span, crc, tables) ^ tail;
}

/* Copy a tile with several targets: its piece's, and those of the pieces after it. */
template <int LANES, int WIDTH>
BL_DEVICE uint32_t bl_spread(bl_span span, const bl_piece *piece, uint32_t others,
                             const uint32_t *tables)
{
    uint32_t count = span.length / WIDTH, crc = 0;
    uint32_t stride = bl_crc_stride<LANES, WIDTH>(tables);
#pragma unroll 1
    for (uint32_t at = span.lane; at < count; at += LANES) {
        uint64_t place = (uint64_t)at * WIDTH;
        bl_word<WIDTH> word = bl_load(span.source + place, bl_word<WIDTH>());
#pragma unroll 1
        for (uint32_t other = 0; other <= others; other++) {
            uint64_t target = span.target + (piece[other].address - piece->address);
            bl_store<false>(target + place, word);
            if (BL_PLANT == BL_PLANT_AGAIN)
                word = bl_load(span.source + place, word);
        }
        crc = bl_crc_advance<WIDTH>(tables, crc, stride) ^ bl_crc_word<WIDTH>(tables, word);
    }
    return bl_move_sum<LANES, WIDTH>(span, crc, tables);
}

template <int LANES>
BL_DEVICE uint32_t bl_spread_any(bl_span span, const bl_piece *piece, uint32_t others,
                                 const uint32_t *tables)
{
    uint64_t places = span.source | span.length;
#pragma unroll 1
    for (uint32_t other = 0; other <= others; other++)
        places |= piece[other].address;
    return places % 16 == 0 ? bl_spread<LANES, 16>(span, piece, others, tables)
                            : bl_spread<LANES, 1>(span, piece, others, tables);
}

template <int LANES, bool TO_POOL, bool SUM>
BL_DEVICE uint32_t bl_move_any(bl_span span, const uint32_t *tables)
{
    uint64_t places = span.source | span.target;
    if (places % 16 == 0)
        return bl_move<LANES, 16, TO_POOL, SUM>(span, tables);
    if (places % 8 == 0)
        return bl_move<LANES, 8, TO_POOL, SUM>(span, tables);
    if (places % 4 == 0)
        return bl_move<LANES, 4, TO_POOL, SUM>(span, tables);
    return bl_move<LANES, 1, TO_POOL, SUM>(span, tables);
}

template <int LANES, bool TO_POOL>
BL_DEVICE void bl_sum_tile(const bl_job *job, const bl_tile *tile, uint32_t chunk, uint32_t value,
                           uint32_t lane)
{
    bl_sum *sum = job->sums + (BL_PLANT == BL_PLANT_CHUNK && chunk > 0 ? chunk - 1 : chunk);
    uint32_t left = bl_sum_add<LANES>(sum, value, tile->power, lane == 0, bl_crc_multiply);
    if (!TO_POOL && left == 0 && bl_sum_read(sum) != sum->expected)
        bl_verdict_bad(job->verdict, chunk);
}

template <int LANES, bool TO_POOL, bool SUM>
BL_DEVICE void bl_copy_tile(const bl_job *job, bl_tile tile, bl_piece piece, uint32_t lane,
                            const uint32_t *tables)
{
    uint32_t length = bl_tile_length(&tile, &piece, job->tile_size);
    uint64_t start = tile.start + (BL_PLANT == BL_PLANT_TILE ? job->tile_size : 0);
    uint64_t pool = bl_window_address(&job->windows, piece.offset) + start;
    uint64_t engine = piece.address ? piece.address + start : 0;
    bl_span span = {TO_POOL ? engine : pool, TO_POOL ? pool : engine, length, lane};
    uint32_t value = !TO_POOL && SUM && tile.extra > 0
                         ? bl_spread_any<LANES>(span, job->pieces + tile.piece, tile.extra, tables)
                         : bl_move_any<LANES, TO_POOL, SUM>(span, tables);
    if (TO_POOL && BL_PLANT != BL_PLANT_PAD)
        for (uint32_t i = lane; i < tile.extra; i += LANES)
            bl_store<TO_POOL>(pool + length + i, bl_word<1>());
    if (SUM)
        bl_sum_tile<LANES, TO_POOL>(job, &tile, piece.chunk - (uint32_t)job->chunk_base, value,
                                    lane);
}

template <int LANES, bool TO_POOL, bool SUM>
BL_DEVICE void bl_copy(const bl_job *job, bl_thread me, const uint32_t *tables)
{
    uint64_t thread = (uint64_t)me.block * me.thread_count + me.thread;
    uint64_t group = thread / LANES, step = (uint64_t)me.block_count * me.thread_count / LANES;
    uint32_t lane = (uint32_t)(thread % LANES), swap = BL_PLANT == BL_PLANT_SWAP;
    if (group >= job->tile_count)
        return;
    bl_tile tile = job->tiles[group];
    bl_piece piece = job->pieces[tile.piece];
#pragma unroll 1
    for (uint64_t next = group; next < job->tile_count;) {
        bl_tile tile_now = tile;
        bl_piece piece_now = piece;
        bl_tile_note(next);
        next += step;
        if (next < job->tile_count) {
            tile = job->tiles[next];
            piece = job->pieces[tile.piece];
        }
        if (swap)
            piece_now.address = job->pieces[tile_now.piece ^ 1].address;
        bl_copy_tile<LANES, TO_POOL, SUM>(job, tile_now, piece_now, lane, tables);
    }
}

/* Copy the tables to shared memory. */
BL_DEVICE void bl_fill_tables(const bl_job *job, uint32_t *tables, bl_thread me)
{
    for (uint32_t i = me.thread; i < BL_TABLE_WORDS; i += me.thread_count)
        tables[i] = job->tables[i];
}

#ifdef __CUDACC__
#define BL_KERNEL(NAME, LANES, TO_POOL, SUM)                                                       \
    extern "C" __global__ void __launch_bounds__(BL_THREADS_MAX) NAME(const bl_job job)            \
    {                                                                                              \
        __shared__ uint32_t tables[SUM ? BL_TABLE_WORDS : 1];                                      \
        bl_thread me = {blockIdx.x, gridDim.x, threadIdx.x, blockDim.x};                           \
        if (SUM) {                                                                                 \
            bl_fill_tables(&job, tables, me);                                                      \
            __syncthreads();                                                                       \
        }                                                                                          \
        bl_copy<LANES, TO_POOL, SUM>(&job, me, tables);                                            \
    }
#else
#include "run.cuh"
#endif

BL_KERNEL(bl_gather, 32, true, false)
BL_KERNEL(bl_gather_sum, 32, true, true)
BL_KERNEL(bl_gather_half, 16, true, false)
BL_KERNEL(bl_gather_half_sum, 16, true, true)
BL_KERNEL(bl_scatter, 32, false, false)
BL_KERNEL(bl_scatter_sum, 32, false, true)
BL_KERNEL(bl_scatter_half, 16, false, false)
BL_KERNEL(bl_scatter_half_sum, 16, false, true)
