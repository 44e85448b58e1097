/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The simulator's heap: all allocations of a world are freed with the world, as a kernel frees a
 * process's memory, because simulated processes die at any verb and free nothing. Every file that
 * allocates must include this header first. One thread uses the heap at a time.
 */
#ifndef BL_SIM_HEAP_H
#define BL_SIM_HEAP_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BL_HEAP_SPOILT_MAX = 4096 };

typedef struct bl_allocation {
    struct bl_allocation *next, *previous; /* in the world's list, which is circular */
    size_t size;
    void *whole;                /* address returned by the C library */
    uint64_t blank[4];          /* pads the header to a line */
} bl_allocation;

static bl_allocation bl_heap = {&bl_heap, &bl_heap, 0, NULL, {0}};
static int bl_heap_open;        /* 1: a world is running */

/* Return line-aligned memory, so that a run does not depend on earlier allocations: a put streams
 * directly from line-aligned memory and stages other bytes. */
static inline void *bl_heap_add(void *whole, size_t size)
{
    if (whole == NULL)
        return NULL;
    bl_allocation *allocation = (bl_allocation *)(((uintptr_t)whole + sizeof *allocation - 1) &
                                                  -(uintptr_t)sizeof *allocation);
    bl_allocation *next = bl_heap_open ? bl_heap.next : allocation;
    *allocation = (bl_allocation){.next = next, .previous = allocation, .size = size,
                                  .whole = whole};
    if (bl_heap_open) {
        allocation->previous = &bl_heap;
        next->previous = bl_heap.next = allocation;
    }
    return allocation + 1;
}

static inline void *bl_heap_malloc(size_t size)
{
    return bl_heap_add(malloc(2 * sizeof(bl_allocation) + size), size);
}

static inline void *bl_heap_calloc(size_t count, size_t size)
{
    size_t whole;
    if (__builtin_mul_overflow(count, size, &whole))
        return NULL;
    return bl_heap_add(calloc(1, 2 * sizeof(bl_allocation) + whole), whole);
}

static inline void bl_heap_free(void *bytes)
{
    if (bytes == NULL)
        return;
    bl_allocation *allocation = (bl_allocation *)bytes - 1;
    allocation->previous->next = allocation->next;
    allocation->next->previous = allocation->previous;
    if (allocation->size <= BL_HEAP_SPOILT_MAX) /* makes a use after free visible */
        memset(bytes, 0xdb, allocation->size);
    free(allocation->whole);
}

static inline void *bl_heap_realloc(void *bytes, size_t size)
{
    void *larger = bl_heap_malloc(size);
    size_t old = bytes ? ((bl_allocation *)bytes - 1)->size : 0;
    if (larger == NULL || bytes == NULL)
        return larger;
    memcpy(larger, bytes, old < size ? old : size);
    bl_heap_free(bytes);
    return larger;
}

/* Free all memory of the world that has ended. */
static inline void bl_heap_sweep(void)
{
    while (bl_heap.next != &bl_heap)
        bl_heap_free(bl_heap.next + 1);
}

#define malloc(size) bl_heap_malloc(size)
#define calloc(count, size) bl_heap_calloc(count, size)
#define realloc(bytes, size) bl_heap_realloc(bytes, size)
#define free(bytes) bl_heap_free(bytes)

#endif
