/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The kernels' accesses on a CPU: the same functions as in ptx.cuh. They optionally record
 * accesses, and abort on those that a GPU would not execute. Threads run one after the other: the
 * kernels need no synchronization between threads, except for their tables.
 */
#ifndef BL_CUDA_HOST_CUH
#define BL_CUDA_HOST_CUH

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "job.cuh"

#define BL_DEVICE static inline

/* One access. The n-th accesses of all lanes, for one span and of one kind, form one step of the
 * group. */
typedef struct bl_access {
    uint64_t address;
    uint32_t thread;            /* of the grid */
    uint32_t span;
    uint32_t size;
    uint32_t store;
} bl_access;

typedef struct bl_trace {
    bl_access *accesses;
    uint64_t capacity;
    uint64_t count;             /* may exceed the number that fitted */
    uint32_t thread;
    uint32_t span;
} bl_trace;

static thread_local bl_trace *bl_tracing;

static inline void bl_access_note(uint64_t address, uint32_t size, uint32_t store)
{
    if (address % size > 0) {
        fprintf(stderr, "misaligned access of %u bytes at %#lx\n", size, (unsigned long)address);
        abort();
    }
    bl_trace *trace = bl_tracing;
    if (!trace)
        return;
    if (trace->count < trace->capacity)
        trace->accesses[trace->count] = {address, trace->thread, trace->span, size, store};
    trace->count++;
}

static inline void bl_span_note(uint64_t span)
{
    if (bl_tracing)
        bl_tracing->span = (uint32_t)span;
}

/* This access is not recorded: it is neither to the pool nor to an engine's memory. */
BL_DEVICE bl_span bl_span_load(const bl_span *span) { return *span; }

template <int WIDTH> BL_DEVICE bl_word<WIDTH> bl_load(uint64_t address, bl_word<WIDTH> word)
{
    bl_access_note(address, WIDTH, 0);
    word.part[0] = 0;
    memcpy(word.part, (const void *)address, WIDTH);
    return word;
}

template <bool TO_POOL, int WIDTH> BL_DEVICE void bl_store(uint64_t address, bl_word<WIDTH> word)
{
    bl_access_note(address, WIDTH, 1);
    memcpy((void *)address, word.part, WIDTH);
}

/* Lanes run one by one, the first one first, so there is no reduction. */
template <int LANES>
BL_DEVICE void bl_sum_put(uint32_t *sum, uint32_t value, uint32_t power, uint32_t lane,
                          uint32_t (*multiply)(uint32_t, uint32_t))
{
    *sum = (lane > 0 ? *sum : 0) ^ multiply(value, power);
}

#endif
