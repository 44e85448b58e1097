/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Runs a kernel on a CPU, block by block, and thread by thread in each block. BL_KERNEL exports it
 * under the name of the GPU kernel.
 */
#ifndef BL_CUDA_RUN_CUH
#define BL_CUDA_RUN_CUH

typedef struct bl_grid {
    uint32_t block_count;
    uint32_t thread_count;
} bl_grid;

#define BL_KERNEL(NAME, LANES, TO_POOL, SUM)                                                       \
    extern "C" void NAME(const bl_job *job, bl_grid grid, bl_trace *trace)                         \
    {                                                                                              \
        uint32_t tables[SUM ? BL_TABLE_WORDS : 1];                                                 \
        static thread_local bl_span spans[BL_BATCH];                                               \
        bl_thread me = {0, grid.block_count, 0, grid.thread_count};                                \
        memset(tables, 0xa5, sizeof tables); /* arbitrary contents, as on a GPU */                 \
        bl_tracing = trace;                                                                        \
        for (; me.block < grid.block_count; me.block++) {                                          \
            for (me.thread = 0; SUM && me.thread < grid.thread_count; me.thread++)                 \
                bl_fill_tables(job, tables, me);                                                   \
            for (uint64_t batch = 0; batch < bl_batch_count(job, me); batch++) {                   \
                memset(spans, 0xa5, sizeof spans);                                                 \
                for (me.thread = 0; me.thread < grid.thread_count; me.thread++)                    \
                    bl_fill_batch(job, spans, batch, me);                                          \
                for (me.thread = 0; me.thread < grid.thread_count; me.thread++) {                  \
                    if (trace)                                                                     \
                        trace->thread = me.block * grid.thread_count + me.thread;                  \
                    bl_copy_batch<LANES, TO_POOL, SUM>(job, spans, batch, me, tables);             \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        bl_tracing = nullptr;                                                                      \
    }

#endif
