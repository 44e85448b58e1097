/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The gather (engine memory to pool) and scatter (pool to engine memory) kernels, with fused
 * CRC-32C. All of a plan is one launch of a few persistent blocks. A block loads the descriptions
 * of many spans at once; each group of its lanes (a warp or half a warp) takes every n-th span, and
 * keeps BL_UNROLL words per lane in flight. If source, target or length are not aligned to 16
 * bytes, words have 8, 4 or 1 bytes. In a scatter, a span without an engine address only
 * contributes to the checksum; where rows overlap, a word is loaded once and stored to all its
 * targets, so the checksum is that of the delivered bytes even if the pool changes meanwhile.
 *
 * This file is compiled by NVRTC; by a C++ compiler, to run on a CPU (host.cuh, run.cuh); and by a
 * C++ compiler with sanitizers, for tests (tests/native/cuda_harness.cu).
 */
#ifdef __CUDACC__
#include "ptx.cuh"
#else
#include "host.cuh"
#endif

#include "crc32c.cuh"

/* One lane's view of a copy. */
typedef struct bl_run {
    uint64_t source;
    uint64_t target;            /* 0: the bytes are only summed */
    uint32_t length;
    uint32_t lane;
} bl_run;

template <int LANES> BL_DEVICE uint32_t bl_unit(uint32_t first, int step, uint32_t lane)
{
    if (BL_PLANT == BL_PLANT_STRIDED)
        return first + lane * BL_UNROLL + (uint32_t)step;
    return first + (uint32_t)step * LANES + lane;
}

/* Copy the bytes after the last whole word, one per lane. */
template <int LANES, bool TO_POOL, bool SUM>
BL_DEVICE uint32_t bl_move_tail(bl_run run, uint32_t start, const uint32_t *tables)
{
    uint32_t place = start + run.lane;
    if (place >= run.length || BL_PLANT == BL_PLANT_TAIL)
        return 0;
    bl_word<1> byte = bl_load(run.source + place, bl_word<1>());
    if (run.target)
        bl_store<TO_POOL>(run.target + place, byte);
    return SUM ? bl_crc_multiply(byte.part[0], bl_crc_power(tables, run.length - place)) : 0;
}

/* Copy a span in words of WIDTH bytes. Returns this lane's part of the span's checksum. */
template <int LANES, int WIDTH, bool TO_POOL, bool SUM>
BL_DEVICE uint32_t bl_move(bl_run run, const uint32_t *tables)
{
    uint32_t count = run.length / WIDTH, next = run.lane, first = 0;
    uint32_t stride = SUM ? bl_crc_stride<LANES, WIDTH>(tables) : 0;
    bl_word<WIDTH> words[BL_UNROLL], sum = {};
#pragma unroll 1
    for (; first + LANES * BL_UNROLL <= count; first += LANES * BL_UNROLL) {
#pragma unroll
        for (int i = 0; i < BL_UNROLL; i++)
            words[i] = bl_load(run.source + bl_unit<LANES>(first, i, run.lane) * WIDTH, words[i]);
        if (run.target) {
#pragma unroll
            for (int i = 0; i < BL_UNROLL; i++)
                bl_store<TO_POOL>(run.target + bl_unit<LANES>(first, i, run.lane) * WIDTH,
                                  words[i]);
        }
        if (SUM) {
#pragma unroll
            for (int i = 0; i < BL_UNROLL; i++)
                bl_crc_step<WIDTH>(tables, stride, &sum, words[i]);
        }
        next += LANES * BL_UNROLL;
    }
#pragma unroll
    for (int i = 0; i < BL_UNROLL; i++)
        if (next + i * LANES < count)
            words[i] = bl_load(run.source + (next + i * LANES) * WIDTH, words[i]);
    if (run.target) {
#pragma unroll
        for (int i = 0; i < BL_UNROLL; i++)
            if (next + i * LANES < count)
                bl_store<TO_POOL>(run.target + (next + i * LANES) * WIDTH, words[i]);
    }
    if (BL_PLANT == BL_PLANT_TWICE && run.target && count > 0 && run.lane == 0)
        bl_store<TO_POOL>(run.target, bl_load(run.source, words[0]));
    uint32_t tail = bl_move_tail<LANES, TO_POOL, SUM>(run, count * WIDTH, tables);
    if (!SUM)
        return 0;
#pragma unroll
    for (int i = 0; i < BL_UNROLL; i++)
        if (next + i * LANES < count)
            bl_crc_step<WIDTH>(tables, stride, &sum, words[i]);
    return bl_crc_end<LANES, WIDTH>(tables, sum, run.length, run.lane) ^ tail;
}

/* Copy a span with several targets: its own, and those of the spans after it. */
template <int LANES, int WIDTH>
BL_DEVICE uint32_t bl_spread(bl_run run, const bl_span *span, uint32_t others,
                             const uint32_t *tables)
{
    uint32_t count = run.length / WIDTH, stride = bl_crc_stride<LANES, WIDTH>(tables);
    bl_word<WIDTH> sum = {};
#pragma unroll 1
    for (uint32_t at = run.lane; at < count; at += LANES) {
        uint64_t place = (uint64_t)at * WIDTH;
        bl_word<WIDTH> word = bl_load(run.source + place, bl_word<WIDTH>());
#pragma unroll 1
        for (uint32_t other = 0; other <= others; other++) {
            bl_store<false>(span[other].engine + place, word);
            if (BL_PLANT == BL_PLANT_AGAIN)
                word = bl_load(run.source + place, word);
        }
        bl_crc_step<WIDTH>(tables, stride, &sum, word);
    }
    return bl_crc_end<LANES, WIDTH>(tables, sum, run.length, run.lane);
}

template <int LANES>
BL_DEVICE uint32_t bl_spread_any(bl_run run, const bl_span *span, uint32_t others,
                                 const uint32_t *tables)
{
    uint64_t places = run.source | run.length;
#pragma unroll 1
    for (uint32_t other = 0; other <= others; other++)
        places |= span[other].engine;
    return places % 16 == 0 ? bl_spread<LANES, 16>(run, span, others, tables)
                            : bl_spread<LANES, 1>(run, span, others, tables);
}

template <int LANES, bool TO_POOL, bool SUM>
BL_DEVICE uint32_t bl_move_any(bl_run run, const uint32_t *tables)
{
    uint64_t places = run.source | run.target;
    if (places % 16 == 0)
        return bl_move<LANES, 16, TO_POOL, SUM>(run, tables);
    if (places % 8 == 0)
        return bl_move<LANES, 8, TO_POOL, SUM>(run, tables);
    if (places % 4 == 0)
        return bl_move<LANES, 4, TO_POOL, SUM>(run, tables);
    return bl_move<LANES, 1, TO_POOL, SUM>(run, tables);
}

/* Copy a span. In a gather, extra is the number of zeros to write after it, up to the end of the
 * line; in a scatter, the number of spans after it that are further targets. */
template <int LANES, bool TO_POOL, bool SUM>
BL_DEVICE void bl_copy_span(const bl_job *job, uint64_t number, bl_span span, uint32_t lane,
                            const uint32_t *tables)
{
    uint64_t pool = span.pool + (BL_PLANT == BL_PLANT_SHIFT ? 64 : 0);
    bl_run run = {TO_POOL ? span.engine : pool, TO_POOL ? pool : span.engine, span.length, lane};
    uint32_t value = !TO_POOL && SUM && span.extra > 0
                         ? bl_spread_any<LANES>(run, job->spans + number, span.extra, tables)
                         : bl_move_any<LANES, TO_POOL, SUM>(run, tables);
    if (TO_POOL && BL_PLANT != BL_PLANT_PAD)
        for (uint32_t i = lane; i < span.extra; i += LANES)
            bl_store<TO_POOL>(pool + span.length + i, bl_word<1>());
    if (SUM)
        bl_sum_put<LANES>(job->sums + (number ^ (BL_PLANT == BL_PLANT_SUM)), value, span.power,
                          lane, bl_crc_multiply);
}

/* Return the number of the span at a position in a block's batch. Blocks take BL_STEP adjacent
 * spans in turn. */
BL_DEVICE uint64_t bl_batch_span(uint64_t batch, uint32_t place, bl_thread me)
{
    uint64_t step = batch * (BL_BATCH / BL_STEP) + place / BL_STEP;
    return (step * me.block_count + me.block) * BL_STEP + place % BL_STEP;
}

BL_DEVICE uint64_t bl_batch_count(const bl_job *job, bl_thread me)
{
    uint64_t size = (uint64_t)BL_BATCH * me.block_count;
    return (job->count + size - 1) / size;
}

/* Load a block's batch of spans, in words of whole warps, because the host's memory has a high
 * latency. */
BL_DEVICE void bl_fill_batch(const bl_job *job, bl_span *spans, uint64_t batch, bl_thread me)
{
    for (uint32_t place = me.thread; place < BL_BATCH; place += me.thread_count) {
        uint64_t number = bl_batch_span(batch, place, me);
        if (number < job->count)
            spans[place] = bl_span_load(job->spans + number);
    }
}

BL_DEVICE void bl_fill_tables(const bl_job *job, uint32_t *tables, bl_thread me)
{
    for (uint32_t i = me.thread; i < BL_TABLE_WORDS; i += me.thread_count)
        tables[i] = job->tables[i];
}

template <int LANES, bool TO_POOL, bool SUM>
BL_DEVICE void bl_copy_batch(const bl_job *job, const bl_span *spans, uint64_t batch, bl_thread me,
                             const uint32_t *tables)
{
    uint32_t lane = me.thread % LANES, groups = me.thread_count / LANES;
#pragma unroll 1
    for (uint32_t place = me.thread / LANES; place < BL_BATCH; place += groups) {
        uint64_t number = bl_batch_span(batch, place, me);
        if (number >= job->count)
            return;
        bl_span span = spans[place];
        bl_span_note(number);
        if (BL_PLANT == BL_PLANT_SWAP)
            span.engine = job->spans[number ^ 1].engine;
        if (span.length > 0)    /* else this is a further target of an earlier span */
            bl_copy_span<LANES, TO_POOL, SUM>(job, number, span, lane, tables);
    }
}

#ifdef __CUDACC__
#define BL_KERNEL(NAME, LANES, TO_POOL, SUM)                                                       \
    extern "C" __global__ void __launch_bounds__(BL_THREADS_MAX) NAME(const bl_job job)            \
    {                                                                                              \
        __shared__ uint32_t tables[SUM ? BL_TABLE_WORDS : 1];                                      \
        __shared__ bl_span spans[BL_BATCH];                                                        \
        bl_thread me = {blockIdx.x, gridDim.x, threadIdx.x, blockDim.x};                           \
        if (SUM)                                                                                   \
            bl_fill_tables(&job, tables, me);                                                      \
        for (uint64_t batch = 0; batch < bl_batch_count(&job, me); batch++) {                      \
            __syncthreads(); /* the last batch has been copied */                                  \
            bl_fill_batch(&job, spans, batch, me);                                                 \
            __syncthreads();                                                                       \
            bl_copy_batch<LANES, TO_POOL, SUM>(&job, spans, batch, me, tables);                    \
        }                                                                                          \
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
