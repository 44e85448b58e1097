/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The simulator's heap: whatever a world allocated is freed with the world, as a kernel frees a
 * process's memory. Simulated processes die at any verb, by the thousand, and free nothing. Every
 * file that allocates must include this header first; one thread uses the heap at a time.
 */
#ifndef BL_HEAP_SIM_H
#define BL_HEAP_SIM_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BL_HEAP_SPOILT_MAX = 4096 };

typedef struct bl_allocation {
    struct bl_allocation *next, *previous; /* in the world's list; the head's point to itself */
    size_t size;
    void *whole;                /* what the C library gave */
    uint64_t blank[4];          /* a header is a line */
} bl_allocation;

static bl_allocation bl_heap = {&bl_heap, &bl_heap, 0, NULL, {0}};
static int bl_heap_open;        /* a world is running */

/* Return memory that begins with a line, so that a run does not depend on what the process did
 * before: a put streams from where its bytes lie if they begin with a line, else it stages them. */
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
    if (allocation->size <= BL_HEAP_SPOILT_MAX) /* a process that still uses it fails soon */
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
