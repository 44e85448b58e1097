/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Zeroed memory for the server's big tables. A page is allocated at its first access, so a table
 * can be sized for the largest pool.
 */
#ifndef BL_LAZY_H
#define BL_LAZY_H

#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Returns NULL if there is no address space or memory left. */
static inline void *bl_lazy_map(size_t size)
{
#ifdef BL_SIM
    return calloc(1, size); /* freed with the world (base/heap_sim.h) */
#else
    void *table = mmap(NULL, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return table == MAP_FAILED ? NULL : table;
#endif
}

/* Map a table that is accessed at random and soon in all pages, with huge pages, which save page
 * walks. */
static inline void *bl_lazy_map_dense(size_t size)
{
    void *table = bl_lazy_map(size);
#ifndef BL_SIM
    if (table)
        madvise(table, size, MADV_HUGEPAGE);
#endif
    return table;
}

/* Allocate the first bytes of a table now instead of at their first access. */
static inline void bl_lazy_populate(void *table, size_t size)
{
#if defined(MADV_POPULATE_WRITE) && !defined(BL_SIM)
    madvise(table, size, MADV_POPULATE_WRITE);
#else
    (void)table, (void)size;
#endif
}

static inline void bl_lazy_unmap(void *table, size_t size)
{
#ifdef BL_SIM
    (void)size;
    free(table);
#else
    if (table)
        munmap(table, size);
#endif
}

#endif
