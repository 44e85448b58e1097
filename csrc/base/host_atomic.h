/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Atomics on memory that only the processes of one host share. They must not be used on the pool,
 * where caches of different hosts are not coherent: its verbs are in coherence/coherence.h.
 */
#ifndef BL_HOST_ATOMIC_H
#define BL_HOST_ATOMIC_H

#include <stdint.h>

static inline uint64_t bl_host_load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void bl_host_store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* Order the stores before this before the stores after it, for the other processes of this host. */
static inline void bl_host_ordered(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }

/* Load a 32-bit word, as in the queues that the kernel shares for io_uring. */
static inline uint32_t bl_host_load_short(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void bl_host_store_short(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* Store value, sequentially consistent. A thread that sees a later store of this thread sees this
 * one, too; all threads agree on the order of such stores. */
static inline void bl_host_exchange(uint64_t *word, uint64_t value)
{
    __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);
}

/* Add amount and return the new value. */
static inline uint64_t bl_host_add(uint64_t *word, uint64_t amount)
{
    return __atomic_add_fetch(word, amount, __ATOMIC_SEQ_CST);
}

static inline int bl_host_swap(uint64_t *word, uint64_t expected, uint64_t value)
{
    return __atomic_compare_exchange_n(word, &expected, value, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_ACQUIRE);
}

/* Return how far a is ahead of b. Counters wrap; two of them are never half their range apart. */
static inline int64_t bl_host_ahead(uint64_t a, uint64_t b)
{
    return (int64_t)(a - b);
}

/* Raise a wrapping counter to value, if it is behind. */
static inline void bl_host_raise(uint64_t *word, uint64_t value)
{
    for (uint64_t seen = bl_host_load(word); bl_host_ahead(value, seen) > 0;
         seen = bl_host_load(word))
        if (bl_host_swap(word, seen, value))
            return;
}

#endif
